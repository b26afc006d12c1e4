"""Sampling parameters and used tokens of the decoding sequences, kept on the device.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from interposer_models._engine.request_batch import penalties_of, sampling_batch
from interposer_models._engine.sequence import Sequence
from interposer_ops.layers.sampler import Penalties, SamplingBatch

_Value = TypeVar("_Value")


@dataclass(slots=True)
class CachedValue(Generic[_Value]):
    """A value that is computed once while consecutive steps run the same sequences."""

    sequences: tuple[Sequence, ...] = ()
    value: _Value | None = None

    def of(self, sequences: Items[Sequence], make: Callable[[], _Value]) -> _Value:
        """Return the value for ``sequences``; call ``make`` if the sequences have changed."""
        if self.value is None or not is_same_batch(self.sequences, sequences):
            self.value, self.sequences = make(), tuple(sequences)
        return self.value


class SamplingState:
    """Sampling batches of consecutive steps, updated on the device.

    If a step has the same sequences as the one before, only the new tokens are counted. If a
    sequence joins or leaves, the parameters are uploaded again, but token counts of the other
    sequences stay on the device.
    """

    def __init__(self, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: tuple[Sequence, ...] = ()
        self._num_counted: list[int] = []  # output tokens of each sequence that are in the batch
        self._batch: SamplingBatch | None = None

    def batch(self, sequences: Items[Sequence]) -> SamplingBatch:
        """Return the sampling parameters of one row of logits per sequence.

        The next call changes the returned tensors.

        Args:
            sequences: Sequences of the step, of which at least one is not greedy.
        """
        if self._batch is not None:
            self._count_new_tokens(self._batch)
        if self._batch is None or not is_same_batch(self._sequences, sequences):
            self._batch = self._rebuild(sequences)
            self._sequences = tuple(sequences)
            self._num_counted = [len(sequence.output) for sequence in sequences]
        return self._batch

    def _count_new_tokens(self, batch: SamplingBatch) -> None:
        """Count the tokens that were appended since the last step."""
        num_new = [
            len(s.output) - num_old
            for s, num_old in zip(self._sequences, self._num_counted, strict=True)
        ]
        if not any(num_new):
            return
        # In plain decoding every sequence gets one token, so a scalar suffices.
        if len({*num_new}) == 1:
            batch.steps.add_(num_new[0])
        else:
            batch.steps.add_(torch.tensor(num_new).to(self._device, non_blocking=True))
        if batch.penalties is not None:
            pairs = [
                (row, token)
                for row, (sequence, count) in enumerate(
                    zip(self._sequences, self._num_counted, strict=True)
                )
                for token in sequence.output[count:]
            ]
            indices = torch.tensor(pairs).T.to(self._device, non_blocking=True)
            counts = batch.penalties.output_counts
            ones = torch.ones(len(pairs), dtype=counts.dtype, device=counts.device)
            counts.index_put_(tuple(indices), ones, accumulate=True)
        self._num_counted = [
            num_old + num_added
            for num_old, num_added in zip(self._num_counted, num_new, strict=True)
        ]

    def _rebuild(self, sequences: Items[Sequence]) -> SamplingBatch:
        """Build the batch of other sequences, and reuse the token counts of known ones."""
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        if not any(sequence.params.is_penalised for sequence in sequences):
            return batch
        old_penalties = None if self._batch is None else self._batch.penalties
        old_rows = (
            {} if old_penalties is None else {s: row for row, s in enumerate(self._sequences)}
        )
        new_sequences = [sequence for sequence in sequences if sequence not in old_rows]
        new_penalties = (
            penalties_of(new_sequences, self._vocab_size, self._device) if new_sequences else None
        )
        if old_penalties is None or len(new_sequences) == len(sequences):
            return replace(batch, penalties=new_penalties)
        row_by_sequence = {
            sequence: len(old_rows) + row for row, sequence in enumerate(new_sequences)
        } | old_rows
        rows = torch.tensor(
            [row_by_sequence[sequence] for sequence in sequences], device=self._device
        )
        return replace(batch, penalties=_select_rows(old_penalties, new_penalties, rows))


def is_same_batch(first: Items[Sequence], second: Items[Sequence]) -> bool:
    """Return whether two lists hold the same sequences in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _select_rows(old: Penalties, new: Penalties | None, rows: Tensor) -> Penalties:
    """Select rows of both penalties; rows of ``new`` are numbered after those of ``old``."""
    names = Penalties.__dataclass_fields__
    if new is None:
        return Penalties(*(getattr(old, name)[rows] for name in names))
    return Penalties(*(torch.cat([getattr(old, n), getattr(new, n)])[rows] for n in names))
