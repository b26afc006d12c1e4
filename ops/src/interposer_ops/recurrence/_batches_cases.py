"""Ragged batches of sequences with states, for the cases of recurrent ops.

Dimensions: T tokens, B sequences, R rows of states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interposer_ops.caches._paging_cases import starts_of
from interposer_testing.workload import typical_sequences

_SPARE_ROWS = 3


@dataclass(frozen=True)
class Batch:
    """Sequences as (tokens before the step, tokens of the step, whether it is one)."""

    sequences: tuple[tuple[int, int, bool], ...]

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return sum(tokens for _, tokens, _ in self.sequences)

    @property
    def longest(self) -> int:
        """Return the most tokens of a sequence in the step."""
        return max((tokens for _, tokens, _ in self.sequences), default=0)

    @property
    def num_rows(self) -> int:
        """Return R; some rows belong to no sequence."""
        return len(self.sequences) + _SPARE_ROWS


def _of(*sequences: tuple[int, int], padding: Sequence[int] = ()) -> Batch:
    return Batch(
        tuple((cached, new, place not in padding) for place, (cached, new) in enumerate(sequences))
    )


BATCHES = {
    "": _of((0, 9), (7, 1), (12, 3), (0, 1)),
    "one token": _of((5, 1)),
    "prefill": _of((0, 9), (0, 4), (0, 1)),
    "decode": _of((1, 1), (4, 1), (12, 1), (30, 1)),
    "chunks after others": _of((8, 4), (3, 5), (64, 7)),
    "padding": _of((0, 3), (4, 1), (9, 1), (0, 2), padding=(1, 3)),
    "padding alone": _of((0, 1), (0, 1), padding=(0, 1)),
    "sequences without a token": _of((6, 2), (5, 0), (3, 1), (0, 0)),
    "long": _of((0, 131), (70, 33), (64, 1)),
    "no sequences": Batch(()),
}


def sampled_batch(num_tokens: int) -> Batch:
    """Return the sequences of a typical step."""
    return _of(*((total - new, new) for total, new in typical_sequences(num_tokens)))


def places(batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Return ``query_starts``, ``slots`` and ``num_cached`` of sequences in shuffled rows."""
    rows = torch.randperm(batch.num_rows, generator=generator)[: len(batch.sequences)]
    known = torch.tensor([known for _, _, known in batch.sequences], dtype=torch.bool)
    return {
        "query_starts": starts_of([tokens for _, tokens, _ in batch.sequences]),
        "slots": torch.where(known, rows, -1),
        "num_cached": torch.tensor([before for before, _, _ in batch.sequences], dtype=torch.int64),
    }


def pooled(drawn: Tensor, batch: Batch, slots: Tensor) -> Tensor:
    """Return ``drawn``, ``[R, ...]``, with NaN in rows that no sequence continues."""
    before = torch.tensor([before for before, _, _ in batch.sequences], dtype=torch.int64)
    states = torch.full_like(drawn, torch.nan)
    rows = slots[(slots >= 0) & (before > 0)]
    states[rows] = drawn[rows]
    return states


def recurrent_peak(
    batch: Batch, kept: Tensor, added: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """Return a bound of the length of what each head holds, after each token.

    Args:
        kept, added: ``[T, N]``: the factor of what is held, and the length of what is added.
        states: ``[R, N]``: the length of what rows hold; NaN where they hold nothing.
    Returns: ``[T, N]`` float64.
    """
    factors, lengths, held = (part.double() for part in (kept, added, states.nan_to_num()))
    peaks, token = [], 0
    for (before, count, known), slot in zip(batch.sequences, slots.tolist(), strict=True):
        bound = held[slot] if known and before else torch.zeros_like(held[0])
        for _ in range(count):
            bound = factors[token] * bound + lengths[token]
            peaks.append(bound)
            token += 1
    return torch.stack(peaks) if peaks else factors
