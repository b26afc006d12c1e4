"""Attention plan of a step for ``SdpaBackend``: computed once and used by all layers.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from interposer import AttentionBatch, AttentionSpec

# In 16 bits, two plain GEMMs are faster than fused attention if a prompt has at least this many
# rows and at most this many bytes of float32 scores. A larger score buffer is newly mapped in every
# call, and the page faults cost more than the GEMMs save.
_GEMM_ROWS, _GEMM_SCORE_BYTES = 64, 1 << 20
# Up to this many bytes of keys and values per sequence, gathering several sequences for one call is
# faster than one call per sequence.
_GATHERED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive cached tokens of one sequence.

    Attributes:
        start: first slot of the cache, or offset in the gathered ``pages``.
        pages: ``[P]`` int64, pages to gather first; None if the slots are consecutive.
    """

    start: int
    num_tokens: int
    pages: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prefill rows of one sequence, or of several complete prompts of equal length.

    Attributes:
        num_sequences: more than 1 only if ``causal`` and ``folded`` are set.
        mask: ``[T, L]`` float32, added to the scores, or None.
        causal: row i attends to the first i + 1 tokens of the span. No token was cached before
            this step, so attention reads the step's keys and values and not the cache.
        folded: ``[G T, L]`` float32, added to the scores of a group's stacked heads; set if plain
            GEMMs are faster than torch's fused attention.
    """

    rows: slice
    span: Span
    mask: torch.Tensor | None
    causal: bool
    folded: torch.Tensor | None
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode row of one sequence: one token that attends to the whole span."""

    rows: slice
    span: Span


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode rows of several sequences, padded to the same number of pages.

    Attributes:
        rows: ``[B]`` int64.
        pages: ``[B * P]`` int64.
        mask: ``[B, 1, 1, P * S]`` float32, added to the scores, or None.
        hidden: int64 indices of the gathered tokens that are masked, or None.
    """

    rows: torch.Tensor
    num_sequences: int
    pages: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one step: cache slots to write (``first_slot`` if consecutive), attention calls."""

    slots: torch.Tensor
    first_slot: int | None
    parts: tuple[Prompt | Decode | Decodes, ...]


def make_plan(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    """Divide the rows of ``batch`` into prompts and decodes, each computed by one call."""
    slots = batch.slots.tolist()
    first = slots[0] if slots and _consecutive(slots) else None
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    token_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.cache_dtype.itemsize
    parts: list[Prompt | Decode | Decodes] = []
    gathered = []
    for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        num_visible = min(length, spec.window_tokens or length)
        if end - start > 1:
            prompt = _prompt(batch, spec, index, slice(start, end), length)
            joined = _join(parts[-1], prompt, spec) if parts else None
            parts[-1:] = [joined] if joined else [*parts[-1:], prompt]
        elif end > start and num_visible * token_bytes > _GATHERED_BYTES:
            parts.append(_decode(batch, spec, start, index, length))
        elif end > start:
            gathered.append((start, index, length))
    # A single sequence needs no padding and no mask.
    if len(gathered) == 1:
        parts.append(_decode(batch, spec, *gathered[0]))
    elif gathered:
        parts.append(_decodes(batch, spec, gathered))
    return Plan(batch.slots, first, tuple(parts))


def _prompt(
    batch: AttentionBatch, spec: AttentionSpec, index: int, rows: slice, length: int
) -> Prompt:
    window = spec.window_tokens or length
    num_cached = length - (rows.stop - rows.start)  # tokens in the cache before this step
    first = max(num_cached - window + 1, 0)
    causal = num_cached == 0 and window >= length
    num_rows, num_tokens = rows.stop - rows.start, length - first
    fits = _score_bytes(spec, num_rows, num_tokens) <= _GEMM_SCORE_BYTES
    uses_gemms = fits and num_rows >= _GEMM_ROWS and spec.dtype.itemsize == 2
    mask = folded = None
    if uses_gemms or not causal:
        distance = torch.arange(num_cached, length)[:, None] - torch.arange(first, length)
        mask = _additive((distance >= 0) & (distance < window))
    if mask is not None and uses_gemms:
        folded = mask.repeat(spec.num_heads // spec.num_kv_heads, 1)
    span = _span(batch.page_table[index], spec.page_size, first, length)
    return Prompt(rows, span, None if causal else mask, causal, folded)


def _join(last: Prompt | Decode | Decodes, new: Prompt, spec: AttentionSpec) -> Prompt | None:
    """Join two complete prompts of equal, small length into one batch; None if impossible."""
    if not (isinstance(last, Prompt) and last.causal and new.causal and new.folded is not None):
        return None
    length, count = new.span.num_tokens, last.num_sequences + 1
    fits = count * _score_bytes(spec, length, length) <= _GEMM_SCORE_BYTES
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
    """Locate a sequence's tokens ``first`` to ``last`` (exclusive) in the cache pages."""
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
    # Padding repeats the last page of a sequence: pages of other sequences may contain NaN and must
    # not be read.
    last_page = (lengths - 1) // size
    columns = (first_page[:, None] + torch.arange(num_pages)).minimum(last_page[:, None])
    pages = batch.page_table[indices[:, None], columns].flatten()
    positions = first_page[:, None] * size + torch.arange(num_pages * size)
    visible = (positions >= first[:, None]) & (positions < lengths[:, None])
    if bool(visible.all()):
        return Decodes(rows, len(members), pages, None, None)
    hidden = (~visible).flatten().nonzero().flatten()
    return Decodes(rows, len(members), pages, _additive(visible)[:, None, None], hidden)


def _additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
