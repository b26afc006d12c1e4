"""Plans of a step: everything that can be decided once for all layers.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from interposer import AttentionBatch, AttentionSpec

# In 16 bits, plain products win from so many rows on, up to so many bytes of float32 scores: larger
# ones are new memory in every call, whose first touch costs more than the products save.
_PRODUCT_ROWS, _PRODUCT_BYTES = 64, 1 << 20
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
class Prompt:
    """Several tokens of one sequence, or whole prompts of one length, in consecutive rows.

    Attributes:
        num_sequences: more than one only where ``causal`` and ``folded`` are set.
        mask: ``[T, L]`` float32 to add to the scores, or None.
        causal: row i sees the first i + 1 tokens of the span; then the step's own keys and
            values are all there is to read.
        folded: ``[G T, L]`` float32 to add to the scores of a group's heads, one below the other;
            set where plain products of matrices are faster than torch's fused attention.
    """

    rows: slice
    span: Span
    mask: torch.Tensor | None
    causal: bool
    folded: torch.Tensor | None
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Decode:
    """One token of one sequence, which sees all of the span."""

    rows: slice
    span: Span


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token each of several sequences, padded to one length.

    Attributes:
        rows: ``[B]`` int64.
        pages: ``[B * P]`` int64.
        mask: ``[B, 1, 1, P * S]`` float32 to add to the scores, or None.
        hidden: int64 indices of the gathered tokens that nobody may see, or None.
    """

    rows: torch.Tensor
    num_sequences: int
    pages: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots to write and groups to compute; ``first_slot`` is set where slots follow each other."""

    slots: torch.Tensor
    first_slot: int | None
    parts: tuple[Prompt | Decode | Decodes, ...]


def make_plan(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    """Return the plan for ``batch``."""
    slots = batch.slots.tolist()
    first = slots[0] if slots and _consecutive(slots) else None
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    token_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.cache_dtype.itemsize
    parts: list[Prompt | Decode | Decodes] = []
    gathered = []
    for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        num_seen = min(length, spec.window_tokens or length)
        if end - start > 1:
            prompt = _prompt(batch, spec, index, slice(start, end), length)
            joined = _join(parts[-1], prompt, spec) if parts else None
            parts[-1:] = [joined] if joined else [*parts[-1:], prompt]
        elif end > start and num_seen * token_bytes > _GATHERED_BYTES:
            parts.append(_decode(batch, spec, start, index, length))
        elif end > start:
            gathered.append((start, index, length))
    if len(gathered) == 1:
        parts.append(_decode(batch, spec, *gathered[0]))
    elif gathered:
        parts.append(_decodes(batch, spec, gathered))
    return Plan(batch.slots, first, tuple(parts))


def _prompt(
    batch: AttentionBatch, spec: AttentionSpec, index: int, rows: slice, length: int
) -> Prompt:
    window = spec.window_tokens or length
    before = length - (rows.stop - rows.start)  # tokens in the cache before this step
    first = max(before - window + 1, 0)
    causal = before == 0 and window >= length
    num_rows, num_tokens = rows.stop - rows.start, length - first
    fits = _score_bytes(spec, num_rows, num_tokens) <= _PRODUCT_BYTES
    products = fits and num_rows >= _PRODUCT_ROWS and spec.dtype.itemsize == 2
    mask = folded = None
    if products or not causal:
        distance = torch.arange(before, length)[:, None] - torch.arange(first, length)
        mask = _additive((distance >= 0) & (distance < window))
    if mask is not None and products:
        folded = mask.repeat(spec.num_heads // spec.num_kv_heads, 1)
    span = _span(batch.page_table[index], spec.page_size, first, length)
    return Prompt(rows, span, None if causal else mask, causal, folded)


def _join(last: Prompt | Decode | Decodes, new: Prompt, spec: AttentionSpec) -> Prompt | None:
    """Return both as one part if both are whole prompts of one length and small enough."""
    if not (isinstance(last, Prompt) and last.causal and new.causal and new.folded is not None):
        return None
    length, count = new.span.num_tokens, last.num_sequences + 1
    fits = count * _score_bytes(spec, length, length) <= _PRODUCT_BYTES
    if last.span.num_tokens != length or last.rows.stop != new.rows.start or not fits:
        return None
    rows = slice(last.rows.start, new.rows.stop)
    return replace(last, rows=rows, num_sequences=count)


def _score_bytes(spec: AttentionSpec, num_rows: int, num_tokens: int) -> int:
    return 4 * spec.num_heads * num_rows * num_tokens


def _decode(
    batch: AttentionBatch, spec: AttentionSpec, row: int, index: int, length: int
) -> Decode:
    first = max(length - (spec.window_tokens or length), 0)
    span = _span(batch.page_table[index], spec.page_size, first, length)
    return Decode(slice(row, row + 1), span)


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
        return Decodes(rows, len(members), pages, None, None)
    hidden = (~seen).flatten().nonzero().flatten()
    return Decodes(rows, len(members), pages, _additive(seen)[:, None, None], hidden)


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
