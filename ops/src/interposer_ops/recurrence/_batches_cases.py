"""Ragged batches of sequences with states, for the cases of recurrent ops.

T tokens, B sequences, R rows of the state pool, N heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interposer_ops.caches._paging_cases import starts_of
from interposer_testing.workload import typical_sequences

# Rows of the pool without a sequence, which kernels must leave unchanged.
_SPARE_ROWS = 3


@dataclass(frozen=True)
class Batch:
    """Sequences of a step: (tokens before, new tokens, False for a padding sequence) each."""

    sequences: tuple[tuple[int, int, bool], ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step, T."""
        return sum(tokens for _, tokens, _ in self.sequences)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence in the step."""
        return max((tokens for _, tokens, _ in self.sequences), default=0)

    @property
    def num_rows(self) -> int:
        """Number of rows of the pool, R; some rows belong to no sequence."""
        return len(self.sequences) + _SPARE_ROWS


def _of(*sequences: tuple[int, int], padding: Sequence[int] = ()) -> Batch:
    return Batch(
        tuple((cached, new, index not in padding) for index, (cached, new) in enumerate(sequences))
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
    """Make the sequences of a typical step."""
    return _of(*((total - new, new) for total, new in typical_sequences(num_tokens)))


def batch_indices(batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Make ``query_starts``, ``slots`` (in random order) and ``num_cached`` of a batch."""
    rows = torch.randperm(batch.num_rows, generator=generator)[: len(batch.sequences)]
    is_valid = torch.tensor([valid for _, _, valid in batch.sequences], dtype=torch.bool)
    return {
        "query_starts": starts_of([tokens for _, tokens, _ in batch.sequences]),
        "slots": torch.where(is_valid, rows, -1),
        "num_cached": torch.tensor([before for before, _, _ in batch.sequences], dtype=torch.int64),
    }


def with_unused_rows(numbers: Tensor, batch: Batch, slots: Tensor) -> Tensor:
    """Replace the rows of ``numbers`` ``[R, ...]`` that kernels must not read by NaN."""
    before = torch.tensor([before for before, _, _ in batch.sequences], dtype=torch.int64)
    states = torch.full_like(numbers, torch.nan)
    rows = slots[(slots >= 0) & (before > 0)]
    states[rows] = numbers[rows]
    return states


def recurrent_peak(
    batch: Batch, decays: Tensor, added: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """Bound the norm of each head's state after each token.

    Args:
        decays: ``[T, N]``: factor of the state at each token.
        added: ``[T, N]``: norm of the token's contribution.
        states: ``[R, N]``: norms of the initial states; NaN in unused rows.
    Returns: ``[T, N]`` float64.
    """
    factors, norms, state_norms = (t.double() for t in (decays, added, states.nan_to_num()))
    peaks, token = [], 0
    for (before, count, is_valid), slot in zip(batch.sequences, slots.tolist(), strict=True):
        norm = state_norms[slot] if is_valid and before else torch.zeros_like(state_norms[0])
        for _ in range(count):
            norm = factors[token] * norm + norms[token]
            peaks.append(norm)
            token += 1
    return torch.stack(peaks) if peaks else factors
