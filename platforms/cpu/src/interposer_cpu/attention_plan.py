"""Plans of a step: everything that can be decided once for all layers.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from interposer import AttentionBatch, AttentionSpec

__all__ = ["Decodes", "Plan", "Prefill", "Span", "make_plan"]

# Bytes of keys and values per sequence up to which one gathered call beats one call each.
_GATHERED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence: ``num_tokens`` from ``start``, a slot or an offset in ``pages``.

    Attributes:
        pages: ``[P]`` int64 to gather first; None where the slots follow each other.
    """

    start: int
    num_tokens: int
    pages: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence with its queries in consecutive rows; a decode is a prefill of one row.

    Attributes:
        mask: ``[T, L]`` float32 to add to the scores, or None.
        causal: row i sees the first i + 1 tokens of the span; then the step's own keys and
            values are all there is to read.
    """

    start_row: int
    num_rows: int
    span: Span
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Decodes:
    """Several sequences of one query each, padded to one length.

    Attributes:
        rows: ``[B]`` int64.
        pages: ``[B * P]`` int64.
        mask: ``[B, 1, 1, P * S]`` float32 to add to the scores, or None.
        hidden: int64 indices of the gathered tokens that nobody may see, or None.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to write, and what to compute; ``first_slot`` is set where slots follow each other."""

    slots: torch.Tensor
    first_slot: int | None
    parts: tuple[Prefill | Decodes, ...]


def make_plan(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    """Return the plan for ``batch``."""
    slots = batch.slots.tolist()
    first = slots[0] if slots and _consecutive(slots) else None
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    token_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.cache_dtype.itemsize
    parts: list[Prefill | Decodes] = []
    gathered = []
    for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        num_seen = min(length, spec.window_tokens or length)
        if end - start == 1 and num_seen * token_bytes <= _GATHERED_BYTES:
            gathered.append((start, index, length))
        elif end > start:
            parts.append(_prefill(batch, spec, index, start, end - start, length))
    if len(gathered) > 1:
        parts.append(_decodes(batch, spec, gathered))
    else:
        parts += [_prefill(batch, spec, index, row, 1, length) for row, index, length in gathered]
    return Plan(batch.slots, first, tuple(parts))


def _prefill(
    batch: AttentionBatch, spec: AttentionSpec, index: int, row: int, num_rows: int, length: int
) -> Prefill:
    window = spec.window_tokens or length
    before = length - num_rows  # tokens in the cache before this step
    first = max(before - window + 1, 0)
    causal = num_rows > 1 and before == 0 and window >= length
    mask = None
    if num_rows > 1 and not causal:
        positions = torch.arange(before, length)[:, None]
        distance = positions - torch.arange(first, length)
        mask = _additive((distance >= 0) & (distance < window))
    span = _span(batch.page_table[index], spec.page_size, first, length)
    return Prefill(row, num_rows, span, mask, causal)


def _span(pages: torch.Tensor, page_size: int, first: int, last: int) -> Span:
    """Return tokens ``first`` to ``last`` (exclusive) of a sequence."""
    pages = pages[first // page_size : -(-last // page_size)]
    numbers = pages.tolist()
    offset = first % page_size
    if _consecutive(numbers):
        return Span(numbers[0] * page_size + offset, last - first, None)
    return Span(offset, last - first, pages)


def _decodes(
    batch: AttentionBatch, spec: AttentionSpec, members: list[tuple[int, int, int]]
) -> Decodes:
    size = spec.page_size
    rows, indices, lengths = (torch.tensor(column) for column in zip(*members, strict=True))
    first = (lengths - (spec.window_tokens or batch.max_seq_tokens)).clamp(min=0)
    first_page = first // size
    num_pages = int((-(-lengths // size) - first_page).max())
    # Pages beyond a sequence's own repeat its last one: nothing foreign is read.
    last_page = (lengths - 1) // size
    columns = (first_page[:, None] + torch.arange(num_pages)).minimum(last_page[:, None])
    pages = batch.page_table[indices[:, None], columns].flatten()
    positions = first_page[:, None] * size + torch.arange(num_pages * size)
    seen = (positions >= first[:, None]) & (positions < lengths[:, None])
    if bool(seen.all()):
        return Decodes(rows, pages, None, None)
    hidden = (~seen).flatten().nonzero().flatten()
    return Decodes(rows, pages, _additive(seen)[:, None, None], hidden)


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
