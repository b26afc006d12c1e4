"""The check of an attention backend against the references of the ops that define it.

Dimensions: T tokens, N heads, K kv heads, D head size, C latent size, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Case, CustomOp, Site
from interposer.records import load_target
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.operand import Operand, poisoned_memory
from interposer_testing._checks.scenario import (
    chunked_steps,
    occupying_step,
    pages_needed,
    trimmed,
)
from interposer_testing.workload import moved_batch, random_projections, random_scales, random_sinks

_HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (3, 1)}
_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window_tokens": 6},
    "softcap": {"softcap": 2.0},
    "window+softcap": {"window_tokens": 3, "softcap": 2.0},
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3 per head": {"cache_dtype": torch.float8_e4m3fn, "head_scales": True},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
    "int8": {"cache_dtype": torch.int8},
    "int8 per head": {"cache_dtype": torch.int8, "head_scales": True},
    "sinks": {"sinks": True},
    "e4m3 with sinks": {"cache_dtype": torch.float8_e4m3fn, "sinks": True},
    "shared": {"shared": True},
    "int8 with sinks, shared": {"cache_dtype": torch.int8, "sinks": True, "shared": True},
}
# Heads, latent and rotary size; the second is that of DeepSeek's models.
_LATENT = {"latent 32+16": (4, 32, 16), "latent 512+64": (2, 512, 64), "latent 20+12": (3, 20, 12)}
_PAGE_SIZES = (4, 16)
_DTYPES = (torch.float32, torch.bfloat16)
_NUM_LAYERS = 2


def attention_specs(
    *, quick: bool = False, page_sizes: Sequence[int] = ()
) -> Iterator[tuple[str, AttentionSpec]]:
    """Yield labelled specs: heads, masks, head sizes, page sizes and dtypes in all combinations.

    A quantized cache, or sinks, are combined with heads and masks only; latent vectors are in
    pages of all sizes. Only those that differ from the first of their dtype in one axis are there
    if ``quick``.

    Args:
        page_sizes: of the backend's record, which go before the usual ones.
    """
    pages = tuple(dict.fromkeys((*page_sizes, *_PAGE_SIZES)))
    axes = (tuple(_HEADS), tuple(_MASKS), (32, 64, 80, 128), pages, tuple(_EXTRAS))
    for heads, mask, head_size, page_size, extra, dtype in product(*axes, _DTYPES):
        point = (heads, mask, head_size, page_size, extra)
        is_other = [value != axis[0] for value, axis in zip(point, axes, strict=True)]
        is_crossed = is_other[4] and (is_other[2] or is_other[3])
        if not is_crossed and not (quick and sum(is_other) > 1):
            yield _spec(heads, mask, head_size, page_size, extra, dtype)
    for (label, sizes), page_size, dtype in product(_LATENT.items(), pages, _DTYPES):
        if not (quick and label != next(iter(_LATENT)) and page_size != pages[0]):
            yield _latent_spec(label, *sizes, page_size, dtype)


def _latent_spec(
    label: str, num_heads: int, latent_size: int, rotary_size: int, page_size: int, dtype: Any
) -> tuple[str, AttentionSpec]:
    head_size = latent_size + rotary_size
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=page_size,
        scale=3 * head_size**-0.5,
        latent=True,
        latent_size=latent_size,
    )
    return f"{label} page {page_size}", spec


def _spec(
    heads: str, mask: str, head_size: int, page_size: int, extra: str, dtype: torch.dtype
) -> tuple[str, AttentionSpec]:
    num_heads, num_kv_heads = _HEADS[heads]
    facts = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
        "cache_dtype": dtype,
        "page_size": page_size,
        # Three times the usual, so that random scores differ enough to matter.
        "scale": 3 * head_size**-0.5,
    }
    spec = AttentionSpec(**{**facts, **_MASKS[mask], **_EXTRAS[extra]})
    label = f"{heads} {mask} head {head_size} page {page_size}"
    return f"{label} {extra}" if _EXTRAS[extra] else label, spec


def check_attention(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Return the departures of ``backend`` from the ops that define paged attention.

    Several steps run over the same cache: chunked prefill and decoding mixed, pages scattered and
    occupied before by NaN, and those that a window has left replaced by one of zeros. The cache
    belongs to the backend, so only results are compared. One plan serves two layers, as in a model.
    What the backend raises is passed on.

    Args:
        site: of the layer; its registry must have ``paged_attention``, or for latent vectors
            ``latent_attention_decode``, and what writes caches.
    """
    generator = torch.Generator().manual_seed(seed)
    with poisoned_memory():
        return _run_steps(backend(spec, site), spec, site, generator)


def _run_steps(
    backend: AttentionBackend, spec: AttentionSpec, site: Site, generator: torch.Generator
) -> list[Fault]:
    """Run all steps on all layers; the first that is wrong ends it, as the rest would follow."""
    device = site.resolver.device.torch_device
    layout, num_pages = backend.kv_layout(), pages_needed(spec.page_size)
    caches = layout.allocate(_NUM_LAYERS, num_pages + 1, device)
    for cache in caches:
        cache.select(layout.page_axis, num_pages).zero_()
    layers = [_Layer(spec, cache, site, generator) for cache in caches]
    _occupy(backend, layers)
    for step, batch in enumerate(chunked_steps(spec.page_size, generator)):
        plan = backend.plan(moved_batch(trimmed(batch, spec, num_pages), device))
        for number, layer in enumerate(layers):
            faults = list(layer.step(backend, batch, plan, generator, fused=number == 1))
            if faults:
                at = f"step {step}, layer {number}"
                return [replace(fault, where=f"{at}, {fault.where}") for fault in faults]
    return []


class _Layer:
    """One layer: the backend's cache and, beside it, the reference's in float64."""

    def __init__(
        self, spec: AttentionSpec, cache: torch.Tensor, site: Site, generator: torch.Generator
    ) -> None:
        registry, self.device = site.resolver.registry, site.resolver.device.torch_device
        written = _writer(spec)
        self.write: CustomOp[..., Any] = load_target(registry.ops[written].target)
        attended = "latent_attention_decode" if spec.latent else "paged_attention"
        self.attend: CustomOp[..., Any] = load_target(registry.ops[attended].target)
        self.spec = spec
        self.cache = cache
        shape = (pages_needed(spec.page_size), spec.page_size, spec.num_kv_heads, spec.head_size)
        self.keys = torch.full(shape, torch.nan, dtype=torch.float64)
        self.values = self.keys.clone()
        self.scales = tuple(random_scales(spec, generator)) if spec.is_quantized else ()
        self.sinks = random_sinks(spec, generator) if spec.sinks else None

    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Return what the backend does for this layer."""
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        if not self.scales:
            if sinks is None:
                return backend.forward(query, key, value, self.cache, plan)
            return backend.forward_with_sinks(query, key, value, self.cache, plan, sinks)
        scales = backend.prepare_scales(*(scale.to(self.device) for scale in self.scales))
        if sinks is not None:
            return backend.forward_quantized_with_sinks(
                query, key, value, self.cache, plan, scales, sinks
            )
        return backend.forward_quantized(query, key, value, self.cache, plan, scales)

    def step(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        plan: Any,
        generator: torch.Generator,
        *,
        fused: bool,
    ) -> Iterator[Fault]:
        """Run one step on both and yield where they differ.

        ``fused`` gives query, key and value as slices of one product.
        """
        num_tokens = int(batch.query_starts[-1])
        given = tuple(random_projections(self.spec, num_tokens, generator, fused=fused))
        operands = [Operand(tensor, self.device) for tensor in given]
        query, key, value = (operand.tensor for operand in operands)
        output = self.forward(backend, query, key, value, plan)
        yield from self._compared("output", output, query, self._expected(batch, *given), batch)
        if self.spec.shared:
            yield from self._stored(backend, batch, plan, query, given)
        for name, operand in zip(("query", "key", "value"), operands, strict=True):
            if operand.is_changed():
                yield Fault("mutation", f"argument {name!r}", "it is written")

    def _stored(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        plan: Any,
        query: torch.Tensor,
        given: tuple[torch.Tensor, ...],
    ) -> Iterator[Fault]:
        """Attend to what the step stored by a query of another layer; yield what is wrong."""
        before = self.cache.clone()
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        scales = None
        if self.scales:
            scales = backend.prepare_scales(*(scale.to(self.device) for scale in self.scales))
        output = backend.forward_stored(-query, self.cache, plan, scales, sinks)
        expected = self._expected(batch, -given[0], *given[1:])
        yield from self._compared("output of stored", output, query, expected, batch)
        bits = [cache.contiguous().view(torch.uint8) for cache in (before, self.cache)]
        if not torch.equal(*bits):
            yield Fault("mutation", "forward_stored", "it writes the cache")

    def _compared(
        self,
        where: str,
        output: torch.Tensor,
        query: torch.Tensor,
        expected: torch.Tensor,
        batch: AttentionBatch,
    ) -> Iterator[Fault]:
        """Yield where an output has another form than the query, or other numbers."""
        # The contract leaves the stride of the output to the backend.
        form = torch.empty_like(query)[..., : expected.shape[-1]]
        faults = [f for f in compare_form(output, form) if f.check != "stride"]
        yield from faults
        if not any(fault.check in ("structure", "shape") for fault in faults):
            yield from compare_value(where, output, expected, self._bound(expected, batch))

    def _expected(
        self, batch: AttentionBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the references' result; stored values are exact in either way of storing."""
        places = batch.page_table, batch.query_starts, batch.seq_lens, batch.max_query_tokens
        if self.spec.latent:
            return self._expected_of_latent(batch, places, query.double(), key.double())
        rounding: tuple[Any, ...] = self.scales
        if not rounding:
            key, value = key.double(), value.double()
        elif self.spec.cache_dtype.is_floating_point:
            rounding = (*rounding, self.spec.cache_dtype)
        self.write.reference(key, value, self.keys, self.values, batch.slots, *rounding)
        expected: torch.Tensor = self.attend.reference(
            query.double(),
            self.keys,
            self.values,
            *places,
            self.spec.scale,
            True,
            self.spec.window_tokens,
            self.spec.softcap,
            self.sinks,
            *((None, None, *self.scales) if self.scales else ()),
        )
        return expected

    def _expected_of_latent(
        self,
        batch: AttentionBatch,
        places: tuple[Any, ...],
        query: torch.Tensor,
        vectors: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[T, N, C]``: the reference's cache of keys holds the vectors ``[T, 1, D]``."""
        size, cache = self.spec.latent_size, self.keys[:, :, 0]
        self.write.reference(vectors[:, 0, :size], vectors[:, 0, size:], cache, batch.slots)
        return self.attend.reference(query, cache, *places, size, self.spec.scale)  # type: ignore[no-any-return]

    def _bound(self, expected: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the op's bound, for numbers that all lie between -1 and 1.

        A score is a sum of D terms that are scaled afterwards; its error is one of the weights,
        which act on values of at most 1.
        """
        spec = self.spec
        case = Case(
            "step",
            {},
            reduction=spec.head_size + batch.max_seq_tokens,
            magnitude=1 + spec.head_size * spec.scale,
            rounded=1.0,
        )
        return self.attend.tolerance.bound(expected, spec.dtype, case)


def _writer(spec: AttentionSpec) -> str:
    """Return the name of the op that stores keys and values."""
    if spec.latent:
        return "write_latent_cache"
    if not spec.is_quantized:
        return "reshape_and_cache"
    kind = "fp8" if spec.cache_dtype.is_floating_point else "int8"
    return f"reshape_and_cache_{kind}"


def _occupy(backend: AttentionBackend, layers: list[_Layer]) -> None:
    """Let a step of NaN go through every page, so that reading a stale slot shows."""
    spec, device = layers[0].spec, layers[0].device
    batch = occupying_step(spec.page_size)
    plan = backend.plan(moved_batch(batch, device))
    given = random_projections(spec, int(batch.query_starts[-1]), torch.Generator(), fused=False)
    for layer in layers:
        query, key, value = (torch.full_like(tensor, torch.nan, device=device) for tensor in given)
        layer.forward(backend, query, key, value, plan)
