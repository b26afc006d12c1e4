"""Attention over a paged cache as a decoder of the shape of Qwen3-0.6B asks for it.

N heads, K kv heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from interposer.errors import FOREIGN_ERRORS, described
from interposer.records import AttentionEntry
from interposer_cpu.platform import CPUPlatform

__all__ = ["AttentionWork", "attention_requests", "backends"]

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
Call = Callable[[], object]


@dataclass(frozen=True)
class AttentionWork:
    """Calls by backend, what a call reads of the cache, and what it multiplies."""

    name: str
    what: str
    num_bytes: float
    flops: float
    calls: dict[str, Call]


def attention_requests(
    registry: Registry, contexts: list[int], batches: list[int], prefill: int, room_bytes: int
) -> Iterator[AttentionWork]:
    """Yield decode steps at each context and batch, then a prompt of ``prefill`` tokens."""
    heads, size = SPEC.num_heads, SPEC.head_size
    per_token = 2 * SPEC.num_kv_heads * size * SPEC.cache_dtype.itemsize
    found = dict(backends(registry, SPEC))
    for num_seqs, context in itertools.product(batches, contexts):
        read = num_seqs * context * per_token
        # As many caches as a model has layers, or as few as are not held by any cache.
        copies = max(1, -(-room_bytes // read))
        calls = {
            name: _call(backend, num_seqs, 1, context, copies) for name, backend in found.items()
        }
        what = f"decode, {num_seqs} x {context}"
        flops = 4.0 * num_seqs * heads * size * context
        yield AttentionWork("attention", what, read, flops, calls)
    calls = {name: _call(backend, 1, prefill, prefill, 4) for name, backend in found.items()}
    # Half of the scores are masked.
    flops = 2.0 * heads * size * prefill**2
    read = prefill * (per_token + 2 * heads * size * SPEC.dtype.itemsize)
    yield AttentionWork("attention", f"prefill, {prefill}", read, flops, calls)


def backends(registry: Registry, spec: AttentionSpec) -> Iterator[tuple[str, Any]]:
    """Yield the backends that take ``spec``; what cannot be built is printed with its reason."""
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
            except FOREIGN_ERRORS as error:
                print(f"{candidate.name}: {described(error)}")


def _call(backend: Any, num_seqs: int, query_tokens: int, context: int, copies: int) -> Call:
    batch = _batch(num_seqs, query_tokens, context)
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    rows = num_seqs * query_tokens
    given = torch.randn(rows, sum(heads), SPEC.head_size).to(SPEC.dtype).split(heads, dim=1)
    caches = backend.kv_layout().allocate(copies, batch.page_table.numel(), "cpu")
    plan = backend.plan(batch)
    turn = itertools.cycle(caches)
    return lambda: backend.forward(*given, next(turn), plan)


def _batch(num_seqs: int, query_tokens: int, context: int) -> AttentionBatch:
    """Return sequences of equal length, each on pages that follow each other."""
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
