"""The forward of a layer that is computed at once, by the layer of the standard decoder block.

It does so over the pages of the engine, and over those of a cache of this project. Every other call
is left to the class, whose parts are bound one by one.

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
from interposer_models._adapt.block_trace import UNREAD, BlockParts
from interposer_models._adapt.block_watch import Watch
from interposer_models._adapt.cache import RowsCache, RowsLayer
from interposer_models._adapt.masks import facts_of
from interposer_models._adapt.paged_rows import PageRows, Pages
from interposer_models._adapt.rotary import RotaryTables
from interposer_models._adapt.visit import VISITOR
from interposer_ops.layers.decoder_block import DecoderBlock

_TAKEN = frozenset({"attention_mask", "position_embeddings", "past_key_values", *UNREAD})


class Steps(threading.local):
    """The angles and the plan of a step, made once for the layers that get the same ones."""

    def __init__(self) -> None:
        self.tables = RotaryTables()
        self._key: tuple[Any, ...] = ()
        self._plan: object = None

    def plan(self, backend: AttentionBackend, pages: Pages, num_tokens: int) -> object:
        """Return the backend's plan for so many tokens more of each sequence."""
        key = (backend, pages.batch, pages.length, num_tokens)
        if key != self._key:
            self._plan, self._key = backend.plan(pages.step(num_tokens)), key
        return self._plan


class BlockForward:
    """The forward of one layer.

    Args:
        block: the standard layer, or what replaces it, with the kernels of the layer's parts.
        rows: where its backend stores keys and values; a reason where that is unknown.
        tell: called with why a call is left to the class.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: BlockParts,
        block: DecoderBlock,
        rows: PageRows | str,
        steps: Steps,
        serves: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        attention: Any = module._modules[parts.attention]
        self.module, self._parts, self._forward = module, parts, block.forward
        self._attention: nn.Module = attention
        self.backend = block.self_attn.attn.backend
        self._dtype = block.self_attn.attn.spec.dtype
        self._rows, self._steps, self._serves, self._tell = rows, steps, serves, tell
        self._told: set[str] = set()
        self.watch: Watch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockForward:
        # The kernels' memory is constant, so that copies can share it.
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in ("module", "_attention", "watch"):
            setattr(twin, name, copy.deepcopy(vars(self)[name], memo))
        return twin

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run it."""
        if not is_compiling():
            found = self.computed(args, named)
            if not isinstance(found, str):
                return found
            if found and found not in self._told:
                self._told.add(found)
                self._tell(found)
        return type(self.module).forward(self.module, *args, **named)

    def computed(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | str:
        """Return ``[B, T, H]``, or why the call is left to the class; empty for no fault of it."""
        if len(args) != 1:
            return "they have other arguments"
        if not named.keys() <= _TAKEN:
            for name, value in named.items():
                if name not in _TAKEN and value is not None and value is not False:
                    return f"they are given {name}"
        (x,) = args
        tables = named.get("position_embeddings")
        if (
            type(x) is not Tensor
            or x.dtype is not self._dtype
            or x.ndim != 3
            or not x.is_cpu
            or x.requires_grad
            or not isinstance(tables, tuple)
            or len(tables) != 2
        ):
            return "they have other tensors than kernels read"
        changed = "" if self.watch is None else self.watch.change()
        if changed:
            return changed
        if not self._serves():
            return "the model has another attention by now"
        batch, num_tokens, hidden_size = shape = x.shape
        if not batch * num_tokens:
            return "they have no tokens"
        size = self._parts.head_size
        cos, sin = tables
        if cos.shape != sin.shape or cos.shape not in (
            (1, num_tokens, size),
            (batch, num_tokens, size),
        ):
            return "their angles are of another size"
        angles = self._steps.tables.of(cos, sin, batch)
        if angles is None:
            return "the halves of their angles differ"
        rows = x.reshape(-1, hidden_size)
        visitor = VISITOR.get()
        if visitor is not None:
            paged = visitor.pages(self._attention) if batch == 1 else None
            if paged is None or paged[0] is not self.backend:
                return ""
            out, stream = self._forward(rows, None, *angles, *paged[1:], None)
        else:
            pages = self._pages(named, batch, num_tokens)
            if isinstance(pages, str):
                return pages
            pages.reserve(num_tokens)
            plan = self._steps.plan(self.backend, pages, num_tokens)
            out, stream = self._forward(rows, None, *angles, pages.cache, plan, None)
            pages.length += num_tokens
        return torch.add(stream, out, out=torch.empty_like(out)).view(shape)

    def _pages(self, named: Mapping[str, Any], batch: int, num_tokens: int) -> Pages | str:
        """Return the pages of a cache, or why there are none."""
        if isinstance(self._rows, str):
            return self._rows
        held = named.get("past_key_values")
        index = self._parts.layer_index
        if type(held) is not RowsCache or index >= len(held.layers):
            return "they have no cache of this project"
        layer = held.layers[index]
        if type(layer) is not RowsLayer or self._parts.window_tokens is not None:
            return "their cache forgets what leaves its window"
        before = layer.get_seq_length()
        mask = named.get("attention_mask")
        if mask is None:
            if num_tokens > 1 and (before or not getattr(self._attention, "is_causal", True)):
                return "they have no mask, but tokens that see each other"
        else:
            facts = facts_of(mask) if isinstance(mask, Tensor) else None
            if (
                facts is None
                or not facts.pattern.causal
                or facts.pattern.window is not None
                or facts.runs is not None
                or (facts.num_queries, facts.num_keys) != (num_tokens, before + num_tokens)
            ):
                return "their mask hides more than what comes later, such as padding"
        found = layer.pages(self._rows, batch)
        if found is None:
            return (
                "their cache holds rows, because somebody looked at it or an earlier call was "
                "computed part by part"
            )
        return found
