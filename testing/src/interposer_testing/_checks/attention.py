"""The check of an attention backend against the references of the ops that define it.

Dimensions: T tokens, N heads, K kv heads, D head size, C latent size, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Case, CustomOp, Site
from interposer.records import load_target
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.naming import naming_faults
from interposer_testing._checks.operand import Operand, poisoned_memory
from interposer_testing._checks.scenario import (
    chunked_steps,
    occupying_step,
    pages_needed,
    source_steps,
    trimmed,
    writing,
)
from interposer_testing.workload import moved_batch, random_projections, random_scales, random_sinks

_NUM_LAYERS = 2


def check_attention(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Return the departures of ``backend`` from the ops that define paged attention.

    Several steps run over the same cache: chunked prefill and decoding mixed, pages scattered and
    occupied before by NaN, and those that a window has left replaced by one of zeros. A source is
    written before the step that reads it first. The cache belongs to the backend, so only results
    are compared. One plan serves two layers, as in a model.
    What the backend raises is passed on.

    Args:
        site: of the layer; its registry must have ``paged_attention``, or for latent vectors
            ``latent_attention_decode`` and ``sparse_latent_attention``, for indexers
            ``indexer_scores``, and what writes caches.
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
    if spec.type == "encoder_decoder":
        return _run_sources(backend, layers, generator)
    for step, batch in enumerate(chunked_steps(spec, generator)):
        plan = backend.plan(moved_batch(trimmed(batch, spec, num_pages), device))
        for number, layer in enumerate(layers):
            faults = list(layer.step(backend, batch, plan, generator, fused=number == 1))
            if faults:
                at = f"step {step}, layer {number}"
                return [replace(fault, where=f"{at}, {fault.where}") for fault in faults]
    return []


def _run_sources(
    backend: AttentionBackend, layers: list[_Layer], generator: torch.Generator
) -> list[Fault]:
    """Do the same where what is stored is of other tokens, and read alone."""
    spec, device = layers[0].spec, layers[0].device
    for step, (written, read) in enumerate(source_steps(spec.page_size, generator)):
        plans = [backend.plan(moved_batch(each, device)) for each in (written, read)]
        for number, layer in enumerate(layers):
            batches, fused = (written, read), number == 1
            faults = list(layer.source_step(backend, batches, plans, generator, fused=fused))
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
        self.attend: CustomOp[..., Any] = load_target(registry.ops[_reader(spec)].target)
        self.attend_to_named: CustomOp[..., Any] | None = None
        if spec.sparse:
            self.attend_to_named = load_target(registry.ops["sparse_latent_attention"].target)
        self.spec = spec
        self.cache = cache
        shape = (pages_needed(spec.page_size), spec.page_size, spec.num_kv_heads, spec.head_size)
        self.keys = torch.full(shape, torch.nan, dtype=torch.float64)
        self.values = self.keys.clone()
        self.scales = tuple(random_scales(spec, generator)) if spec.is_quantized else ()
        self.sinks = random_sinks(spec, generator) if spec.sinks else None
        self.slopes = _slopes(spec.num_heads, spec.alibi_bias_max) if spec.alibi else None

    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Any,
        **out: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the backend does for this layer, perhaps in the memory ``out``."""
        call: Callable[..., torch.Tensor]
        step = (query, key, value, self.cache, plan)
        sinks = () if self.sinks is None else (self.sinks.to(self.device),)
        if not self.scales:
            call = backend.forward_with_sinks if sinks else backend.forward
            return call(*step, *sinks, **out)
        scales = backend.prepare_scales(*(scale.to(self.device) for scale in self.scales))
        call = backend.forward_quantized_with_sinks if sinks else backend.forward_quantized
        return call(*step, scales, *sinks, **out)

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

        ``fused`` gives query, key and value as slices of one product, and memory for the output
        where the backend takes it.
        """
        given = tuple(
            random_projections(self.spec, len(batch.slots), generator, fused=fused, batch=batch)
        )
        operands = [Operand(tensor, self.device) for tensor in given]
        query, key, value = (operand.tensor for operand in operands)
        expected = self._expected(batch, *given)
        asked = {}
        if fused and backend.takes_out:
            asked["out"] = query.new_empty(expected.shape)
        output = self.forward(backend, query, key, value, plan, **asked)
        if asked and output is not asked["out"]:
            yield Fault("structure", "output", "it is other memory than 'out'")
        if self.spec.type == "indexer":
            yield from naming_faults(output, expected, _score_error(self.spec), self.spec.top_k)
        else:
            yield from self._compared("output", output, query, expected, batch)
        if self.spec.shared:
            yield from self._stored(backend, batch, plan, query, given)
        for name, operand in zip(("query", "key", "value"), operands, strict=True):
            if operand.is_changed():
                yield Fault("mutation", f"argument {name!r}", "it is written")

    def source_step(
        self,
        backend: AttentionBackend,
        batches: tuple[AttentionBatch, AttentionBatch],
        plans: list[Any],
        generator: torch.Generator,
        *,
        fused: bool,
    ) -> Iterator[Fault]:
        """Store what is new of sources, perhaps nothing, then attend; yield what is wrong."""
        written, read = batches
        given = random_projections(self.spec, len(written.slots), generator, fused=fused)
        operands = [Operand(tensor, self.device) for tensor in given]
        query, key, value = (operand.tensor for operand in operands)
        output = self.forward(backend, query[:0], key, value, plans[0])
        if output.numel():
            yield Fault("shape", "output", f"no query was given, got {[*output.shape]}")
        for name, operand in zip(("query", "key", "value"), operands, strict=True):
            if operand.is_changed():
                yield Fault("mutation", f"argument {name!r}", "it is written")
        keys, values = given[1].double(), given[2].double()
        self.write.reference(keys, values, self.keys, self.values, written.slots)
        count = int(read.query_starts[-1])
        query, *others = random_projections(self.spec, count, generator, fused=False)
        unwritten = replace(read, slots=read.slots[:0])
        none = tuple(tensor[:0] for tensor in others)
        yield from self._stored(backend, unwritten, plans[1], query.to(self.device), (query, *none))

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
        """Return the references' result; stored values are exact in either way of storing.

        Of an indexer it is the scores ``[T, L]``, of which the largest are to be named.
        """
        places = batch.page_table, batch.query_starts, batch.seq_lens, batch.max_query_tokens
        if self.spec.type == "indexer":
            part, cache = self.spec.head_size // 2, self.keys[:, :, 0]
            vectors = key[:, 0].double()
            self.write.reference(vectors[:, :part], vectors[:, part:], cache, batch.slots)
            scored: torch.Tensor = self.attend.reference(
                query.double(), cache, value.double(), *places[:3], batch.max_seq_tokens
            )
            return scored
        if self.spec.latent:
            return self._expected_of_latent(batch, places, query.double(), key.double(), value)
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
            self.spec.type != "encoder_decoder",
            self.spec.window_tokens,
            self.spec.softcap,
            self.sinks,
            self.slopes,
            batch.prefix_lens,
            *self.scales,
        )
        return expected

    def _expected_of_latent(
        self,
        batch: AttentionBatch,
        places: tuple[Any, ...],
        query: torch.Tensor,
        vectors: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[T, N, C]``: the reference's cache of keys holds the vectors ``[T, 1, D]``."""
        size, cache = self.spec.latent_size, self.keys[:, :, 0]
        self.write.reference(vectors[:, 0, :size], vectors[:, 0, size:], cache, batch.slots)
        if self.attend_to_named is not None and value.shape[1]:
            sequences = torch.repeat_interleave(batch.query_starts.diff())
            named: torch.Tensor = self.attend_to_named.reference(
                query, cache, batch.page_table, sequences, value, size, self.spec.scale
            )
            return named
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


def _slopes(num_heads: int, bias_max: float) -> torch.Tensor:
    """Return the slopes of ALiBi (arXiv:2108.12409), ``[N]`` float64."""
    power = 2 ** math.floor(math.log2(num_heads))
    usual = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    between = [2 ** (-bias_max * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return torch.tensor(usual + between[: num_heads - power], dtype=torch.float64)


def _score_error(spec: AttentionSpec) -> float:
    """Return how far a score in float32 may be off, of numbers between -1 and 1.

    It is a sum over heads of weighted sums over their elements: of N D products of at most 1, each
    of which goes through D + N additions and two further roundings.
    """
    products, steps = spec.num_heads * spec.head_size, spec.num_heads + spec.head_size + 2
    return products * steps * torch.finfo(torch.float32).eps


def _writer(spec: AttentionSpec) -> str:
    """Return the name of the op that stores keys and values."""
    if spec.latent or spec.type == "indexer":
        return "write_latent_cache"
    if not spec.is_quantized:
        return "reshape_and_cache"
    kind = "fp8" if spec.cache_dtype.is_floating_point else "int8"
    return f"reshape_and_cache_{kind}"


def _reader(spec: AttentionSpec) -> str:
    """Return the name of the op that attends to all of a sequence, or scores it."""
    if spec.type == "indexer":
        return "indexer_scores"
    return "latent_attention_decode" if spec.latent else "paged_attention"


def _occupy(backend: AttentionBackend, layers: list[_Layer]) -> None:
    """Let a step of NaN go through every page, so that reading a stale slot shows."""
    spec, device = layers[0].spec, layers[0].device
    batch = occupying_step(spec.page_size)
    if spec.type == "encoder_decoder":
        batch = writing(batch.slots)
    plan = backend.plan(moved_batch(batch, device))
    given = random_projections(spec, len(batch.slots), torch.Generator(), fused=False, batch=batch)
    for layer in layers:
        query, key, value = (
            torch.full_like(x, torch.nan if x.is_floating_point() else -1, device=device)
            for x in given
        )
        if spec.type == "encoder_decoder":
            query = query[:0]
        layer.forward(backend, query, key, value, plan)
