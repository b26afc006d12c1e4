"""The check of an attention backend against the references of the corresponding ops.

Dimensions: T tokens, N heads, K kv heads, D head size, C latent size, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Case, CustomOp, Site
from interposer.records import load_target
from interposer_testing._checks.attention_steps import (
    chunked_steps,
    cross_attention_steps,
    full_cache_step,
    num_pages_needed,
    without_old_pages,
    write_batch,
)
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.operand import Operand, poisoned_memory
from interposer_testing._checks.top_k_selection import selection_faults
from interposer_testing.workload import moved_batch, random_projections, random_scales, random_sinks

_NUM_LAYERS = 2


def check_attention(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Compare ``backend`` with the reference ops of paged attention, over several steps.

    The steps share one cache and mix chunked prefill with decoding. Pages are scattered and filled
    with NaN first; pages that left the attention window are replaced by a page of zeros. Encoder
    inputs are written before the first step that reads them. The cache layout belongs to the
    backend, so only outputs are compared. Two layers share each plan, as in a model. Exceptions of
    the backend are passed on.

    Args:
        site: site of the layer. The registry must have the ops that write the cache, and
            ``paged_attention``; for latent attention ``latent_attention_decode`` and
            ``sparse_latent_attention`` instead, and for indexers ``indexer_scores``.
    Returns: the faults of the first wrong step; empty if all steps are correct.
    """
    backend.check_keywords(spec)
    generator = torch.Generator().manual_seed(seed)
    with poisoned_memory():
        return _run_steps(backend(spec, site), spec, site, generator)


def _run_steps(
    backend: AttentionBackend, spec: AttentionSpec, site: Site, generator: torch.Generator
) -> list[Fault]:
    """Run all steps on all layers until the first wrong result, which would affect later steps."""
    device = site.resolver.device.torch_device
    layout, num_pages = backend.kv_layout(), num_pages_needed(spec.page_size)
    caches = layout.allocate(_NUM_LAYERS, num_pages + 1, device)
    # The extra last page is the page of zeros.
    for cache in caches:
        cache.select(layout.page_axis, num_pages).zero_()
    layers = [_Layer(spec, cache, site, generator) for cache in caches]
    _fill_with_nan(backend, layers)
    if spec.type == "encoder_decoder":
        return _run_encoder_inputs(backend, layers, generator)
    for step, batch in enumerate(chunked_steps(spec, generator)):
        plan = backend.plan(moved_batch(without_old_pages(batch, spec, num_pages), device))
        for index, layer in enumerate(layers):
            faults = list(layer.step(backend, batch, plan, generator, fused=index == 1))
            if faults:
                prefix = f"step {step}, layer {index}"
                return [replace(fault, where=f"{prefix}, {fault.where}") for fault in faults]
    return []


def _run_encoder_inputs(
    backend: AttentionBackend, layers: list[_Layer], generator: torch.Generator
) -> list[Fault]:
    """Run all steps of cross-attention: keys and values come from encoder inputs."""
    spec, device = layers[0].spec, layers[0].device
    for step, batches in enumerate(cross_attention_steps(spec.page_size, generator)):
        plans = [backend.plan(moved_batch(batch, device)) for batch in batches]
        for index, layer in enumerate(layers):
            fused = index == 1
            faults = list(layer.source_step(backend, batches, plans, generator, fused=fused))
            if faults:
                prefix = f"step {step}, layer {index}"
                return [replace(fault, where=f"{prefix}, {fault.where}") for fault in faults]
    return []


class _Layer:
    """One layer, with the cache of the backend and a float64 cache for the reference ops."""

    def __init__(
        self, spec: AttentionSpec, cache: torch.Tensor, site: Site, generator: torch.Generator
    ) -> None:
        registry, self.device = site.resolver.registry, site.resolver.device.torch_device
        self.write: CustomOp[..., Any] = load_target(registry.ops[_write_op(spec)].target)
        self.attend: CustomOp[..., Any] = load_target(registry.ops[_attention_op(spec)].target)
        # The op for steps in which an indexer has selected tokens.
        self.attend_sparsely: CustomOp[..., Any] | None = None
        if spec.sparse:
            self.attend_sparsely = load_target(registry.ops["sparse_latent_attention"].target)
        self.spec = spec
        self.cache = cache
        # The reference's own cache; NaN shows reads of unwritten slots.
        shape = (
            num_pages_needed(spec.page_size),
            spec.page_size,
            spec.num_kv_heads,
            spec.head_size,
        )
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
        **options: Any,
    ) -> torch.Tensor:
        """Call ``forward`` of the backend with the scales and sinks of this layer."""
        if self.scales:
            scales = (scale.to(self.device) for scale in self.scales)
            options["scales"] = backend.prepare_scales(*scales)
        if self.sinks is not None:
            options["sinks"] = self.sinks.to(self.device)
        return backend.forward(query, key, value, self.cache, plan, **options)

    def step(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        plan: Any,
        generator: torch.Generator,
        *,
        fused: bool,
    ) -> Iterator[Fault]:
        """Run one step with the backend and the reference, and yield the differences.

        Args:
            fused: pass query, key and value as slices of one tensor, as a fused QKV projection
                does, and a buffer for the output if the backend accepts one.
        """
        projections = tuple(
            random_projections(self.spec, len(batch.slots), generator, fused=fused, batch=batch)
        )
        operands = [Operand(tensor, self.device) for tensor in projections]
        query, key, value = (operand.tensor for operand in operands)
        expected = self._expected(batch, *projections)
        buffers = {}
        if fused and backend.takes("out"):
            buffers["out"] = query.new_empty(expected.shape)
        output = self.forward(backend, query, key, value, plan, **buffers)
        if buffers and output is not buffers["out"]:
            yield Fault("structure", "output", "the result is not the tensor passed as 'out'")
        if self.spec.type == "indexer":
            yield from selection_faults(output, expected, _score_error(self.spec), self.spec.top_k)
        else:
            yield from self._compare("output", output, query, expected, batch)
        if self.spec.shared:
            yield from self._check_stored(backend, batch, plan, query, projections)
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
        """Write new encoder inputs, if any, then attend; yield differences to the reference."""
        store_batch, query_batch = batches
        projections = random_projections(self.spec, len(store_batch.slots), generator, fused=fused)
        operands = [Operand(tensor, self.device) for tensor in projections]
        query, key, value = (operand.tensor for operand in operands)
        output = self.forward(backend, query[:0], key, value, plans[0])
        if output.numel():
            yield Fault("shape", "output", f"no query was given, got {[*output.shape]}")
        for name, operand in zip(("query", "key", "value"), operands, strict=True):
            if operand.is_changed():
                yield Fault("mutation", f"argument {name!r}", "it is written")
        keys, values = projections[1].double(), projections[2].double()
        self.write.reference(keys, values, self.keys, self.values, store_batch.slots)
        num_queries = int(query_batch.query_starts[-1])
        query, key, value = random_projections(self.spec, num_queries, generator, fused=False)
        # Only queries: this step stores no keys and values.
        reads_only = replace(query_batch, slots=query_batch.slots[:0])
        yield from self._check_stored(
            backend, reads_only, plans[1], query.to(self.device), (query, key[:0], value[:0])
        )

    def _check_stored(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        plan: Any,
        query: torch.Tensor,
        projections: tuple[torch.Tensor, ...],
    ) -> Iterator[Fault]:
        """Check that a layer without keys of its own attends to this step's stored keys."""
        # ``-query`` stands for the query of another layer that shares this layer's keys.
        before = self.cache.clone()
        nothing = query[:0, : self.spec.num_kv_heads]
        output = self.forward(backend, -query, nothing, nothing, plan, stored=True)
        expected = self._expected(batch, -projections[0], *projections[1:])
        yield from self._compare("output of stored", output, query, expected, batch)
        bits = [cache.contiguous().view(torch.uint8) for cache in (before, self.cache)]
        if not torch.equal(*bits):
            yield Fault("mutation", "forward with stored=True", "it writes the cache")

    def _compare(
        self,
        where: str,
        output: torch.Tensor,
        query: torch.Tensor,
        expected: torch.Tensor,
        batch: AttentionBatch,
    ) -> Iterator[Fault]:
        """Yield a fault if the form or a value of the output is wrong."""
        # The contract leaves the stride of the output to the backend.
        form = torch.empty_like(query)[..., : expected.shape[-1]]
        faults = [f for f in compare_form(output, form) if f.check != "stride"]
        yield from faults
        if not any(fault.check in ("structure", "shape") for fault in faults):
            yield from compare_value(where, output, expected, self._bound(expected, batch))

    def _expected(
        self, batch: AttentionBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Compute the expected output with the reference ops, in float64.

        For an indexer, return the scores ``[T, L]``; the backend must select the largest.
        """
        locations = batch.page_table, batch.query_starts, batch.seq_lens, batch.max_query_tokens
        if self.spec.type == "indexer":
            # The op that writes latent vectors takes them in two parts, here two halves.
            part, cache = self.spec.head_size // 2, self.keys[:, :, 0]
            vectors = key[:, 0].double()
            self.write.reference(vectors[:, :part], vectors[:, part:], cache, batch.slots)
            scored: torch.Tensor = self.attend.reference(
                query.double(), cache, value.double(), *locations[:3], batch.max_seq_tokens
            )
            return scored
        if self.spec.latent:
            return self._expected_latent(batch, locations, query.double(), key.double(), value)
        quantization: tuple[Any, ...] = self.scales
        if not quantization:
            key, value = key.double(), value.double()
        elif self.spec.cache_dtype.is_floating_point:
            quantization = (*quantization, self.spec.cache_dtype)
        # A float64 cache holds quantized values exactly, so the reference rounds like the backend.
        self.write.reference(key, value, self.keys, self.values, batch.slots, *quantization)
        expected: torch.Tensor = self.attend.reference(
            query.double(),
            self.keys,
            self.values,
            *locations,
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

    def _expected_latent(
        self,
        batch: AttentionBatch,
        locations: tuple[Any, ...],
        query: torch.Tensor,
        vectors: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the expected output ``[T, N, C]`` of latent attention.

        The key cache of the reference holds the latent vectors ``[T, 1, D]``.
        """
        size, cache = self.spec.latent_size, self.keys[:, :, 0]
        self.write.reference(vectors[:, 0, :size], vectors[:, 0, size:], cache, batch.slots)
        if self.attend_sparsely is not None and value.shape[1]:
            sequences = torch.repeat_interleave(batch.query_starts.diff())
            output: torch.Tensor = self.attend_sparsely.reference(
                query, cache, batch.page_table, sequences, value, size, self.spec.scale
            )
            return output
        return self.attend.reference(query, cache, *locations, size, self.spec.scale)  # type: ignore[no-any-return]

    def _bound(self, expected: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the error bound of the op for inputs between -1 and 1.

        A score is a scaled sum of D terms. The error of a score is a relative error of the softmax
        weights, which multiply values of at most 1.
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
    """Return the ALiBi slopes ``[N]`` in float64 (arXiv:2108.12409)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    # Heads beyond a power of two take every second slope of twice as many heads.
    extra_slopes = [2 ** (-bias_max * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return torch.tensor(slopes + extra_slopes[: num_heads - power], dtype=torch.float64)


def _score_error(spec: AttentionSpec) -> float:
    """Return the error bound of an indexer score in float32, for inputs between -1 and 1.

    A score sums N D products of at most 1. Each product goes through D + N additions and two more
    roundings.
    """
    num_products, steps = spec.num_heads * spec.head_size, spec.num_heads + spec.head_size + 2
    return num_products * steps * torch.finfo(torch.float32).eps


def _write_op(spec: AttentionSpec) -> str:
    """Return the name of the op that writes keys and values to the cache."""
    if spec.latent or spec.type == "indexer":
        return "write_latent_cache"
    if not spec.is_quantized:
        return "reshape_and_cache"
    kind = "fp8" if spec.cache_dtype.is_floating_point else "int8"
    return f"reshape_and_cache_{kind}"


def _attention_op(spec: AttentionSpec) -> str:
    """Return the name of the reference op: paged attention, latent attention or indexer scores."""
    if spec.type == "indexer":
        return "indexer_scores"
    return "latent_attention_decode" if spec.latent else "paged_attention"


def _fill_with_nan(backend: AttentionBackend, layers: list[_Layer]) -> None:
    """Write NaN to every slot of the cache, so that reading a stale slot changes the result."""
    spec, device = layers[0].spec, layers[0].device
    batch = full_cache_step(spec.page_size)
    if spec.type == "encoder_decoder":
        batch = write_batch(batch.slots)
    plan = backend.plan(moved_batch(batch, device))
    projections = random_projections(
        spec, len(batch.slots), torch.Generator(), fused=False, batch=batch
    )
    for layer in layers:
        query, key, value = (
            torch.full_like(x, torch.nan if x.is_floating_point() else -1, device=device)
            for x in projections
        )
        if spec.type == "encoder_decoder":
            query = query[:0]
        layer.forward(backend, query, key, value, plan)
