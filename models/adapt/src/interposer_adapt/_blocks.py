"""Binding of transformer layers that run as one standard decoder block.

``bind_blocks`` finds layers that match the block, and accepts a block after a numerical trial
against the replaced layer. ``BlockForward`` runs the block over the pages of the engine or of a
``RowsCache``. All other calls run the forward of the layer's class, with the parts bound one by
one.

Dimensions: B sequences, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from operator import contains, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks
from transformers.cache_utils import DynamicLayer

from interposer import AttentionBackend, AttentionSpec, Config, Site, Verdict
from interposer_adapt._adaptation import Adaptation, Place, notes
from interposer_adapt._agreement import ROUNDINGS, distance, perturb_once, random_normals
from interposer_adapt._attention_registry import ATTENTION_FIELD, NAME
from interposer_adapt._block_trace import UNREAD_ARGUMENTS, BlockParts, attention_child, trace_block
from interposer_adapt._cache_argument import cache_argument
from interposer_adapt._caches import (
    PageIndex,
    Pages,
    RowsCache,
    RowsLayer,
    find_page_index,
    uniform_batch,
)
from interposer_adapt._forwards import (
    INTERCEPTOR,
    AttentionCall,
    MakeMask,
    ModuleForward,
    PagedCache,
    class_forward,
    intercepted_by,
)
from interposer_adapt._masks import mask_facts
from interposer_adapt._norms import find_norm
from interposer_adapt._projections import set_weights
from interposer_adapt._rotary import RotaryTables
from interposer_ops.attention import common_page_size
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.norms import rms_norm

_FORWARD = "forward"
_forward_of = itemgetter(_FORWARD)


class Watch:
    """Snapshot of a layer's modules, forwards and hooks, by which later changes are noticed.

    Every call of every layer compares the snapshot, so the comparison runs in C, without Python
    loops.

    Args:
        layer: hooks of the layer itself are not watched, as the caller runs them.
        attention: the child that may have a ``ModuleForward``.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        modules = list(layer.modules())
        inner = modules[1:]
        self._children: list[Any] = [m._modules for m in modules if m._modules]
        self._modules = [*chain.from_iterable(map(dict.values, self._children))]
        self._replaced = [m for m in inner if _FORWARD in vars(m)]
        self._forwards = [vars(m)[_FORWARD] for m in self._replaced]
        self._unreplaced = [m for m in inner if _FORWARD not in vars(m)]
        self._hooks: list[Any] = [
            hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._layer, self._attention = layer, attention
        self._classes = (type(layer).forward, type(attention).forward)
        forward = vars(attention).get(_FORWARD)
        self._override = forward.override if isinstance(forward, ModuleForward) else None
        self._attributes: tuple[list[Any], list[Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # deepcopy maps modules and their containers to the copied layer's by way of the memo.
        twin = copy.copy(self)
        for name in ("_children", "_modules", "_replaced", "_forwards", "_unreplaced", "_hooks"):
            setattr(twin, name, copy.deepcopy(vars(self)[name], memo))
        twin._layer = copy.deepcopy(self._layer, memo)
        twin._attention = copy.deepcopy(self._attention, memo)
        # The copies have no attributes yet; describe_change collects these at the first call.
        twin._attributes = None
        return twin

    def describe_change(self) -> str:
        """Return a description of the changes to the layer's modules, or "" if there are none."""
        if (
            any(self._hooks)
            or module_hooks._global_forward_hooks
            or module_hooks._global_forward_pre_hooks
        ):
            return "a module within it has hooks"
        current = [*chain.from_iterable(map(dict.values, self._children))]
        if len(current) != len(self._modules) or not all(map(is_, current, self._modules)):
            return "a module within it was exchanged"
        if self._attributes is None:
            self._attributes = (
                [vars(m) for m in self._replaced],
                [vars(m) for m in self._unreplaced],
            )
        replaced, unreplaced = self._attributes
        try:
            is_same = all(map(is_, map(_forward_of, replaced), self._forwards))
        except KeyError:
            is_same = False
        if not is_same or any(map(contains, unreplaced, repeat(_FORWARD))):
            return "the forward of a module within it was replaced"
        layer, attention = type(self._layer).forward, type(self._attention).forward
        if layer is not self._classes[0] or attention is not self._classes[1]:
            return "the forward of its class was replaced"
        if self._override is not None and self._override.apply(attention) is attention:
            return "its class calls another rotary embedding"
        return ""


def bind_blocks(adaptation: Adaptation) -> None:
    """Bind the model's layers that one standard decoder block can compute.

    The parts of a layer are bound already, and serve the calls that the block does not support.
    """
    if adaptation.device.type != "cpu" or "transformers" not in sys.modules:
        # Each step compares the halves of the rotary tables, which would synchronize with a device.
        return
    skipped: list[Place] = []
    binder = _BlockBinder(adaptation)
    for name, module in adaptation.model.named_modules():
        attention = attention_child(module)
        layers = (adaptation.layers_by_modules.get((id(child),)) for child in module.children())
        gated = [layer for layer in layers if isinstance(layer, GatedMLP)]
        if attention is None or len(gated) != 1:
            continue
        hidden_size = gated[0].gate_up_proj.in_features
        results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
        bind = partial(binder.bind, module, name, attention, hidden_size)
        if not adaptation.attempt(module, name, bind):
            skipped.append(adaptation.results[name])
            adaptation.results, adaptation.handled_ids = results, handled_ids
    adaptation.notes += (
        note.replace("left as it was", "computed part by part") for note in notes(skipped)
    )


def _conflicting_rule(config: Config) -> str:
    """Return the first kernel rule of the user that decoder blocks would ignore, or ""."""
    for rule in config.kernels:
        op, _, place = rule.partition("@")
        if op in ("*", "ragged_attention") or (place and op in ("rms_norm", "rotary_embedding")):
            return rule
    return ""


class _BlockBinder:
    """Binds the blocks of one model, with the page sizes and tables that the blocks share."""

    def __init__(self, adaptation: Adaptation) -> None:
        self._adaptation = adaptation
        self._steps = StepCache()
        self._page_sizes: dict[AttentionSpec, int] = {}
        self._page_indexes: dict[AttentionBackend, PageIndex | Verdict] = {}

    def bind(self, module: nn.Module, name: str, attention: str, hidden_size: int) -> str | Verdict:
        """Bind one layer to a decoder block, and return the block's name or a refusal."""
        adaptation = self._adaptation
        inner: Any = module._modules[attention]
        if "forward" in vars(module) or not isinstance(
            vars(inner).get("forward", ModuleForward(inner)), ModuleForward
        ):
            return Verdict.refuse("another library wrapped its forward")
        if any(id(part) in adaptation.wrapped_ids for part in module.modules()):
            return Verdict.refuse("another library wrapped the forward of a part of it")
        watch = Watch(module, inner)
        change = watch.describe_change()
        if change:
            return Verdict.refuse(change)
        config = getattr(inner, "config", None)
        if config is None or vars(config).get(ATTENTION_FIELD) != NAME:
            return Verdict.refuse("its attention is not routed to kernels")
        if any(p is not None for m in (module, inner) for p in m._parameters.values()):
            return Verdict.refuse("it has parameters in addition to those of its parts")
        conflicting_rule = _conflicting_rule(adaptation.resolver.config)
        if conflicting_rule:
            return Verdict.refuse(f"the rule {conflicting_rule!r} names the kernel of a part")
        parts = trace_block(module, attention, hidden_size)
        if isinstance(parts, Verdict):
            return parts
        block = self._build_block(module, name, parts, hidden_size)
        if isinstance(block, Verdict):
            return block
        backend = block.self_attn.attn.backend
        if backend not in self._page_indexes:
            self._page_indexes[backend] = find_page_index(backend)
        page_index = self._page_indexes[backend]
        config_attributes = vars(config)

        def is_routed() -> bool:
            return bool(config_attributes.get(ATTENTION_FIELD) == NAME)

        def report(reason: str) -> None:
            place = adaptation.results[name]
            remark = f"some calls are computed part by part: {reason}"
            remark = f"{place.reason}; {remark}" if place.reason else remark
            adaptation.results[name] = Place(name, place.kind, place.kernel, remark)

        page_index_or_reason = page_index.reason if isinstance(page_index, Verdict) else page_index
        forward = BlockForward(
            module, parts, block, page_index_or_reason, self._steps, is_routed, report
        )
        verdict = check_block(module, parts, forward, hidden_size)
        if not verdict:
            return verdict
        # No _refuse_training here: the parts of the block refuse training and conversion already.
        adaptation.changes.set(module, "forward", forward)
        forward.watch = watch
        return f"{type(block).__module__.partition('.')[0]}/{type(block).__name__}"

    def _build_block(
        self, module: nn.Module, name: str, parts: BlockParts, hidden_size: int
    ) -> DecoderBlock | Verdict:
        """Return a decoder block that uses the kernels of the layer's bound parts."""
        adaptation = self._adaptation

        def submodule(label: str) -> Any:
            return module.get_submodule(label)

        merged = adaptation.layers_by_modules.get(
            tuple(id(submodule(label)) for label in (parts.query, parts.key, parts.value))
        )
        output = adaptation.layers_by_modules.get((id(submodule(parts.output)),))
        mlp = adaptation.layers_by_modules.get((id(submodule(parts.mlp)),))
        if not isinstance(merged, MergedLinear):
            return Verdict.refuse("its queries, keys and values are not one merged matmul")
        if not isinstance(output, Linear) or not isinstance(mlp, GatedMLP):
            return Verdict.refuse("its last projection or its gated MLP is not bound")
        dtype: torch.dtype = submodule(parts.query).weight.dtype
        norms = self._norms(module, parts, dtype)
        if isinstance(norms, Verdict):
            return norms
        (eps, _), (_, _), *head_norm_values = norms
        site = adaptation.site(name, dtype)
        spec = self._spec(parts, adaptation.site(f"{name}.{parts.attention}.attn", dtype))
        biases = [
            submodule(parts.query).bias,
            submodule(parts.key).bias,
            submodule(parts.value).bias,
        ]
        with torch.device("meta"):
            block = DecoderBlock(
                site,
                hidden_size,
                eps,
                lambda at: SelfAttention(
                    at,
                    spec,
                    hidden_size,
                    parts.head_size,
                    head_norm_values[0][0] if head_norm_values else None,
                    any(bias is not None for bias in biases),
                    submodule(parts.output).bias is not None,
                ),
                lambda _: mlp,
            )
        # The standard class runs its parts one by one, as the transformers layer does already.
        if type(block) is DecoderBlock:
            return Verdict.refuse("no installed layer computes a block at once")
        self_attention = block.self_attn
        for block_layer, bound_layer in (
            (self_attention.qkv_proj, merged),
            (self_attention.o_proj, output),
        ):
            if type(block_layer) is not type(bound_layer):
                return Verdict.refuse(
                    f"a block has a {type(block_layer).__name__} in place of a part"
                )
            # The block shares kernels and packed constants of the bound parts: no weight is packed
            # twice.
            for parameter in block_layer._parameters:
                block_layer._parameters[parameter] = None
            block_layer.method, block_layer.kernel, block_layer.operands = (
                bound_layer.method,
                bound_layer.kernel,
                bound_layer.operands,
            )
        layers = (block.input_layernorm, block.post_attention_layernorm)
        head_norms = (self_attention.q_norm, self_attention.k_norm) if head_norm_values else ()
        for layer, (_, weight) in zip((*layers, *head_norms), norms, strict=True):
            assert isinstance(layer, RMSNorm)
            set_weights(layer, weight=weight)
        return block

    def _norms(
        self, module: nn.Module, parts: BlockParts, dtype: torch.dtype
    ) -> list[tuple[float, Tensor]] | Verdict:
        """Return epsilon and weight of the layer's norms: input, post-attention, query, key."""
        norms = []
        for label in (parts.input_norm, parts.post_norm, parts.query_norm, parts.key_norm):
            if not label:
                continue
            norm_module = module.get_submodule(label)
            norm = find_norm(norm_module)
            if norm is None or norm.op is not rms_norm or not norm.weight:
                return Verdict.refuse(f"its {label} is no RMS norm with a weight")
            weight = norm_module._parameters[norm.weight]
            if weight is None or weight.dtype is not dtype:
                return Verdict.refuse(f"its {label} has a weight of another dtype")
            norms.append((float(getattr(norm_module, norm.eps)), weight.data))
        for pair in (norms[:2], norms[2:]):
            if len({eps for eps, _ in pair}) > 1 or len(pair) == 1:
                return Verdict.refuse("its norms differ in their epsilons")
        return norms

    def _spec(self, parts: BlockParts, site: Site) -> AttentionSpec:
        """Return the block's ``AttentionSpec``, with the page size that all backends share."""

        def spec(page_size: int) -> AttentionSpec:
            return AttentionSpec(
                num_heads=parts.num_heads,
                num_kv_heads=parts.num_kv_heads,
                head_size=parts.head_size,
                dtype=site.dtype,
                cache_dtype=site.dtype,
                page_size=page_size,
                scale=parts.scale,
                window_tokens=parts.window_tokens,
            )

        single = spec(1)
        if single not in self._page_sizes:
            resolver = self._adaptation.resolver
            self._page_sizes[single] = common_page_size(resolver, [(single, site)])
        return spec(self._page_sizes[single])


_SUPPORTED_ARGUMENTS = frozenset({"attention_mask", "position_embeddings", *UNREAD_ARGUMENTS})


class StepCache(threading.local):
    """The rotary tables and attention plan of one step, shared by layers with equal inputs."""

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
    """The forward of one layer, computed by a standard decoder block.

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
        self.cache_argument = cache_argument(type(module).forward)
        self._supported_arguments = _SUPPORTED_ARGUMENTS | {self.cache_argument}
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
        """Run the decoder block, or the class's forward if the block does not support the call."""
        if not is_compiling():
            result = self.compute(args, kwargs)
            if not isinstance(result, str):
                return result
            if result and result not in self._reported_reasons:
                self._reported_reasons.add(result)
                self._report(result)
        return type(self.module).forward(self.module, *args, **kwargs)

    def compute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | str:
        """Run the decoder block, ``[B, T, H]``, or return the reason why the class must run.

        The reason is "" in a situation that needs no report.
        """
        if len(args) != 1:
            return "they have other arguments"
        supported = self._supported_arguments
        if not kwargs.keys() <= supported:
            for name, value in kwargs.items():
                if name not in supported and value is not None and value is not False:
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
        """Return the layer's pages of the KV cache, or the reason why the cache has no pages."""
        if isinstance(self._page_index, str):
            return self._page_index
        cache = kwargs.get(self.cache_argument)
        index = self._parts.layer_index
        if type(cache) is not RowsCache or index >= len(cache.layers):
            return "they have no cache of interposer"
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


# Tokens of each step: prefill, decode, chunk.
_STEPS = (5, 1, 2)


def check_block(
    module: nn.Module, parts: BlockParts, forward: BlockForward, hidden_size: int
) -> Verdict:
    """Refuse a block whose results differ from the layer's by more than rounding explains.

    Both run over a cache. The effect of one rounding of the input is measured. Each run has
    ``ROUNDINGS`` independent roundings; the bound is twice the root of the sum of squares.
    """
    num_tokens, dtype = sum(_STEPS), forward.backend.spec.dtype
    x = random_normals((1, num_tokens, hidden_size), dtype, torch.device("cpu"))
    angles = random_normals((1, num_tokens, parts.head_size // 2), torch.float64, x.device) * 3
    trial = _Trial(module, parts, forward, (angles.cos().to(dtype), angles.sin().to(dtype)))
    with torch.no_grad():
        # The input is scaled to the size of the layer's update, so that neither hides the other.
        update_size = (trial.run_class(x).double() - x.double()).square().mean().sqrt()
        x = (x * float(update_size.clamp(1e-3, 1e3))).to(dtype)
        expected, perturbed = trial.run_class(x), trial.run_class(perturb_once(x))
        actual = trial.run_block(x)
    if isinstance(actual, str):
        return Verdict.refuse(f"a trial of it ran on its class: {actual}")
    one_rounding = max(distance(perturbed, expected), torch.finfo(dtype).eps / 2)
    excess = distance(actual, expected) / (2 * math.sqrt(2 * ROUNDINGS) * one_rounding)
    if excess <= 1:
        return Verdict.accept()
    return Verdict.refuse(f"its error is {excess:.1f} times as large as rounding explains")


class _Trial:
    """Trial that runs a layer on the tokens of one sequence, in several steps.

    Args:
        tables: cosines and sines, ``[1, T, D / 2]``.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: BlockParts,
        forward: BlockForward,
        tables: tuple[Tensor, Tensor],
    ) -> None:
        self._class_forward, self._parts, self._forward = class_forward(module), parts, forward
        self._tables = [torch.cat((table, table), -1) for table in tables]

    def _arguments(self, first: int, end: int) -> dict[str, Any]:
        angles = tuple(table[:, first:end] for table in self._tables)
        return {"position_embeddings": angles, "use_cache": True}

    def run_class(self, x: Tensor) -> Tensor:
        """Run the forward of the layer's class, ``[1, T, H]``."""
        cache, outputs = _SingleLayerCache(), []
        for first, end in pairwise(accumulate(_STEPS, initial=0)):
            distance = torch.arange(first, end)[:, None] - torch.arange(end)
            window = self._parts.window_tokens or end
            outputs.append(
                self._class_forward(
                    x[:, first:end],
                    attention_mask=((distance >= 0) & (distance < window))[None, None],
                    **{self._forward.cache_argument: cache},
                    **self._arguments(first, end),
                )
            )
        return torch.cat(outputs, dim=1)

    def run_block(self, x: Tensor) -> Tensor | str:
        """Run the block on a paged cache, ``[1, T, H]``, or return the reason for a refusal."""
        backend = self._forward.backend
        size = backend.spec.page_size
        (cache,) = backend.kv_layout().allocate(1, -(-x.shape[1] // size), "cpu")
        outputs = []
        for first, end in pairwise(accumulate(_STEPS, initial=0)):
            plan = backend.plan(uniform_batch(1, end - first, first, size))
            with intercepted_by(_PagedInterceptor((backend, cache, plan))):
                out = self._forward.compute((x[:, first:end],), self._arguments(first, end))
            if isinstance(out, str):
                return out
            outputs.append(out)
        return torch.cat(outputs, dim=1)


class _SingleLayerCache:
    """A KV cache for one layer, which ignores the layer index."""

    def __init__(self) -> None:
        self._layer = DynamicLayer()

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.update(key, value)


class _PagedInterceptor:
    """Interceptor that gives a block one paged KV cache."""

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def paged_cache(self, module: nn.Module) -> PagedCache:
        return self._paged

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        return make(**settings)

    def attend(self, call: AttentionCall) -> Tensor:
        # A block computes its own attention, so that this call means a wrong trace.
        raise RuntimeError("a block asked for its attention")
