"""The forward of a transformer layer that runs as one standard decoder block.

The block runs over the pages of the engine or of a ``RowsCache``. All other calls run the forward
of the layer's class, with the parts bound one by one.

Dimensions: B sequences, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import AttentionBackend
from interposer_models._adapt.attention_interceptor import INTERCEPTOR
from interposer_models._adapt.block_trace import UNREAD_ARGUMENTS, BlockParts
from interposer_models._adapt.block_watch import Watch
from interposer_models._adapt.cache import RowsCache, RowsLayer
from interposer_models._adapt.masks import mask_facts
from interposer_models._adapt.paged_rows import PageIndex, Pages
from interposer_models._adapt.rotary import RotaryTables
from interposer_ops.layers.decoder_block import DecoderBlock

_SUPPORTED_ARGUMENTS = frozenset(
    {"attention_mask", "position_embeddings", "past_key_values", *UNREAD_ARGUMENTS}
)


class StepCache(threading.local):
    """The rotary tables and attention plan of a step, shared by layers with the same inputs."""

    def __init__(self) -> None:
        self.tables = RotaryTables()
        self._key: tuple[Any, ...] = ()
        self._plan: object = None

    def plan(self, backend: AttentionBackend, pages: Pages, num_tokens: int) -> object:
        """Return the backend's plan for ``num_tokens`` new tokens of each sequence."""
        key = (backend, pages.batch, pages.length, num_tokens)
        if key != self._key:
            self._plan, self._key = backend.plan(pages.step(num_tokens)), key
        return self._plan


class BlockForward:
    """The forward of one layer, computed by a decoder block.

    Args:
        block: the standard block, or a plugin's replacement, with the kernels of the layer's parts.
        page_index: where the block's backend stores keys and values; a reason if that is unknown.
        is_routed: returns False once the model's attention is no longer interposer's.
        report: called with the reason when a call runs the class's forward.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: BlockParts,
        block: DecoderBlock,
        page_index: PageIndex | str,
        steps: StepCache,
        is_routed: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        attention: Any = module._modules[parts.attention]
        self.module, self._parts, self._forward = module, parts, block.forward
        self._attention: nn.Module = attention
        self.backend = block.self_attn.attn.backend
        self._dtype = block.self_attn.attn.spec.dtype
        self._page_index, self._steps = page_index, steps
        self._is_routed, self._report = is_routed, report
        self._reported_reasons: set[str] = set()
        self.watch: Watch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockForward:
        # The kernels' memory is constant, so that copies can share it.
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in ("module", "_attention", "watch"):
            setattr(twin, name, copy.deepcopy(vars(self)[name], memo))
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or the class's forward if the block does not support the call."""
        if not is_compiling():
            result = self.compute(args, kwargs)
            if not isinstance(result, str):
                return result
            if result and result not in self._reported_reasons:
                self._reported_reasons.add(result)
                self._report(result)
        return type(self.module).forward(self.module, *args, **kwargs)

    def compute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | str:
        """Run the block, ``[B, T, H]``, or return the reason why the class must run.

        The reason is "" in a situation that needs no report.
        """
        if len(args) != 1:
            return "they have other arguments"
        if not kwargs.keys() <= _SUPPORTED_ARGUMENTS:
            for name, value in kwargs.items():
                if name not in _SUPPORTED_ARGUMENTS and value is not None and value is not False:
                    return f"they are given {name}"
        (x,) = args
        tables = kwargs.get("position_embeddings")
        if (
            type(x) is not Tensor
            or x.dtype is not self._dtype
            or x.ndim != 3
            or not x.is_cpu
            or x.requires_grad
            or not isinstance(tables, tuple)
            or len(tables) != 2
        ):
            return "they have tensors that the kernels do not support"
        change = "" if self.watch is None else self.watch.describe_change()
        if change:
            return change
        if not self._is_routed():
            return "the model's attention implementation was changed"
        batch, num_tokens, hidden_size = shape = x.shape
        if not batch * num_tokens:
            return "they have no tokens"
        size = self._parts.head_size
        cos, sin = tables
        if cos.shape != sin.shape or cos.shape not in (
            (1, num_tokens, size),
            (batch, num_tokens, size),
        ):
            return "their rotary tables have another size"
        angles = self._steps.tables.prepare(cos, sin, batch)
        if angles is None:
            return "the halves of their rotary tables differ"
        rows = x.reshape(-1, hidden_size)
        interceptor = INTERCEPTOR.get()
        if interceptor is not None:
            # The engine's steps are one row with the tokens of all sequences.
            paged = interceptor.paged_cache(self._attention) if batch == 1 else None
            if paged is None or paged[0] is not self.backend:
                return ""
            out, stream = self._forward(rows, None, *angles, *paged[1:], None)
        else:
            pages = self._pages(kwargs, batch, num_tokens)
            if isinstance(pages, str):
                return pages
            pages.reserve(num_tokens)
            plan = self._steps.plan(self.backend, pages, num_tokens)
            out, stream = self._forward(rows, None, *angles, pages.cache, plan, None)
            # Only after the forward, so that a failed step leaves the cache unchanged.
            pages.length += num_tokens
        return torch.add(stream, out, out=torch.empty_like(out)).view(shape)

    def _pages(self, kwargs: Mapping[str, Any], batch: int, num_tokens: int) -> Pages | str:
        """Return the layer's pages of the cache, or the reason why the cache has none."""
        if isinstance(self._page_index, str):
            return self._page_index
        cache = kwargs.get("past_key_values")
        index = self._parts.layer_index
        if type(cache) is not RowsCache or index >= len(cache.layers):
            return "they have no cache of this project"
        layer = cache.layers[index]
        if type(layer) is not RowsLayer or self._parts.window_tokens is not None:
            return "their cache drops tokens outside its window"
        num_cached = layer.get_seq_length()
        mask = kwargs.get("attention_mask")
        if mask is None:
            if num_tokens > 1 and (num_cached or not getattr(self._attention, "is_causal", True)):
                return "they have no mask, but tokens that see each other"
        else:
            facts = mask_facts(mask) if isinstance(mask, Tensor) else None
            if (
                facts is None
                or not facts.pattern.causal
                or facts.pattern.window is not None
                or facts.runs is not None
                or (facts.num_queries, facts.num_keys) != (num_tokens, num_cached + num_tokens)
            ):
                return "their mask hides more than later tokens, such as padding"
        pages = layer.pages(self._page_index, batch)
        if pages is None:
            return (
                "their cache holds rows, because its tensors were read or an earlier call was "
                "computed part by part"
            )
        return pages
