"""Plans of a step for ``sdpa_gathered``: what is read of the cache, once for all layers.

Dimensions: B sequences, T tokens, P pages, S page size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from interposer import AttentionBatch, AttentionSpec


@dataclass(frozen=True, slots=True)
class Prompt:
    """Several tokens of one sequence, in consecutive rows.

    Attributes:
        slots: ``[L]`` int64, of the cache, that are read; None where the tokens of this step are
            all that there is and each sees those before it.
        seen: ``[T, L]`` bool; None where ``slots`` is.
    """

    rows: slice
    slots: torch.Tensor | None
    seen: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token each of several sequences.

    Attributes:
        rows: ``[B]`` int64.
        slots: ``[B, L]`` int64; beyond what a sequence sees, slots that it does see.
        seen: ``[B, L]`` bool.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to write, ``[T]`` int64, and what to compute."""

    slots: torch.Tensor
    parts: tuple[Prompt | Decodes, ...]


def make_plan(batch: AttentionBatch, spec: AttentionSpec) -> Plan:
    """Return the plan for ``batch``; lengths are read on the host, for which it waits."""
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    parts: list[Prompt | Decodes] = []
    single = []
    for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        if end - start > 1:
            parts.append(_prompt(batch, spec, index, slice(start, end), length))
        elif end > start:
            single.append((start, index, length))
    if single:
        parts.append(_decodes(batch, spec, single))
    return Plan(batch.slots, tuple(parts))


def _prompt(
    batch: AttentionBatch, spec: AttentionSpec, index: int, rows: slice, length: int
) -> Prompt:
    window = spec.window_tokens or length
    before = length - (rows.stop - rows.start)
    if before == 0 and window >= length:
        return Prompt(rows, None, None)
    device = batch.slots.device
    places = torch.arange(max(before - window + 1, 0), length, device=device)
    distance = torch.arange(before, length, device=device)[:, None] - places
    slots = _slots(batch.page_table[index][None], places[None], spec.page_size)[0]
    return Prompt(rows, slots, (distance >= 0) & (distance < window))


def _decodes(
    batch: AttentionBatch, spec: AttentionSpec, members: list[tuple[int, int, int]]
) -> Decodes:
    device = batch.slots.device
    rows, indices, lengths = torch.tensor(members, device=device).unbind(1)
    window = spec.window_tokens or batch.max_seq_tokens
    width = min(max(length for _, _, length in members), window)
    first = (lengths - window).clamp(min=0)
    places = first[:, None] + torch.arange(width, device=device)  # [B, L]
    seen = places < lengths[:, None]
    # What a sequence does not have is its last token once more: nothing foreign is read, and
    # nothing that was never written, whose NaN a weight of zero does not silence.
    own = places.minimum(lengths[:, None] - 1)
    return Decodes(rows, _slots(batch.page_table[indices], own, spec.page_size), seen)


def _slots(page_table: torch.Tensor, places: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of ``places`` ``[B, L]`` in sequences with ``page_table`` ``[B, P]``."""
    return page_table.gather(1, places // page_size) * page_size + places % page_size
