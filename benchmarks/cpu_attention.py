"""Time paged attention at the shapes of a Qwen3-0.6B decoder.

N heads, K kv heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Config,
    Registry,
    Request,
    Resolver,
    Site,
)
from interposer.errors import described, foreign_errors
from interposer.records import AttentionEntry
from interposer.tooling import UINT4
from interposer_cpu import CPUPlatform
from interposer_ops.devices.host_memory import cache_memory

__all__ = ["CACHES", "SPEC", "AttentionWork", "attention_call", "attention_requests", "backends"]

PAGE_SIZE = 16
SPEC = AttentionSpec(
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    page_size=PAGE_SIZE,
    scale=128**-0.5,
)
CACHES = {
    "attention": torch.bfloat16,
    "attention-fp8": torch.float8_e4m3fn,
    "attention-int8": torch.int8,
    "attention-int4": UINT4,
}
# Largest value in an 8-bit cache; the scales map it to 1.
_DEVIATION = {torch.bfloat16: 1.0, torch.float8_e4m3fn: 100.0, torch.int8: 40.0}
Call = Callable[[], object]


@dataclass(frozen=True)
class AttentionWork:
    """Calls of a workload by backend, with the bytes read and the operations computed per call."""

    name: str
    what: str
    num_bytes: float
    flops: float
    calls: dict[str, Call]


def attention_requests(
    registry: Registry,
    name: str,
    contexts: list[int],
    batches: list[int],
    prefill: int,
    room_bytes: int,
) -> Iterator[AttentionWork]:
    """Yield decode steps for every context and batch size, then a prompt of ``prefill`` tokens.

    Args:
        name: a key of ``CACHES``.
        room_bytes: total size of the KV caches, larger than any CPU cache.
    """
    spec = replace(SPEC, cache_dtype=CACHES[name])
    heads, size = spec.num_heads, spec.head_size
    found = dict(backends(registry, spec))
    layouts = [backend.kv_layout() for backend in found.values()]
    per_token = layouts[0].page_bytes() // PAGE_SIZE
    for num_seqs, context in itertools.product(batches, contexts):
        read = num_seqs * context * per_token
        # One cache per layer, but at least so many that they exceed the CPU caches.
        copies = max(1, -(-room_bytes // read))
        calls = {
            kernel: attention_call(backend, spec, (num_seqs, 1, context), copies)
            for kernel, backend in found.items()
        }
        what = f"decode, {num_seqs} x {context}"
        flops = 4.0 * num_seqs * heads * size * context
        yield AttentionWork(name, what, read, flops, calls)
    calls = {
        kernel: attention_call(backend, spec, (1, prefill, prefill), 4)
        for kernel, backend in found.items()
    }
    # The causal mask hides half of the scores.
    flops = 2.0 * heads * size * prefill**2
    read = prefill * (per_token + 2 * heads * size * spec.dtype.itemsize)
    yield AttentionWork(name, f"prefill, {prefill}", read, flops, calls)


def backends(registry: Registry, spec: AttentionSpec) -> Iterator[tuple[str, Any]]:
    """Yield the backends that accept ``spec``; print why a backend cannot be built."""
    device = CPUPlatform().devices()[0]
    resolver = Resolver(registry, device, Config())
    site = Site(resolver, "attention", spec.dtype)
    request = Request(
        "attention",
        spec.type,
        "cpu",
        device.capability,
        str(spec.dtype).removeprefix("torch."),
        spec.dims(),
        spec,
    )
    for candidate in resolver.accepted(request):
        if isinstance(candidate.record, AttentionEntry):
            try:
                yield candidate.name, registry.load(candidate, candidate.record.target)(spec, site)
            except foreign_errors() as error:
                print(f"{candidate.name}: {described(error)}")


def attention_call(
    backend: Any, spec: AttentionSpec, sizes: tuple[int, int, int], copies: int
) -> Call:
    """Build a call for a number of sequences, query tokens and context tokens."""
    num_seqs, query_tokens, context = sizes
    batch = _batch(num_seqs, query_tokens, context)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    rows = num_seqs * query_tokens
    given = torch.randn(rows, sum(heads), spec.head_size).to(spec.dtype).split(heads, dim=1)
    layout = backend.kv_layout()
    caches = layout.allocate(copies, batch.page_table.numel(), "cpu", cache_memory)
    deviation = _DEVIATION.get(spec.cache_dtype, 1.0)
    for cache in caches:
        # Unwritten pages have no physical memory, and would be read from a CPU cache.
        shape = list(cache.shape)
        shape[layout.page_axis] = 1
        if layout.dtype == torch.uint8:  # codes beside steps and bases, which are numbers so
            cache.copy_(torch.randint(0, 64, shape))
        else:
            cache.copy_(torch.randn(shape).mul_(deviation).clamp_(-127, 127))
    plan = backend.plan(batch)
    turn = itertools.cycle(caches)
    if not spec.is_quantized:
        return lambda: backend.forward(*given, next(turn), plan)
    scales = backend.prepare_scales(*torch.full((2, 1), 1 / deviation).unbind())
    return lambda: backend.forward(*given, next(turn), plan, scales=scales)


def _batch(num_seqs: int, query_tokens: int, context: int) -> AttentionBatch:
    """Build a batch of sequences of equal length, each on consecutive pages."""
    num_pages = -(-context // PAGE_SIZE)
    pages = torch.arange(num_seqs * num_pages).view(num_seqs, -1)
    positions = torch.arange(context - query_tokens, context)
    slots = pages[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return AttentionBatch(
        query_starts=torch.arange(num_seqs + 1) * query_tokens,
        seq_lens=torch.full((num_seqs,), context),
        page_table=pages,
        slots=slots.flatten(),
        max_query_tokens=query_tokens,
        max_seq_tokens=context,
    )
