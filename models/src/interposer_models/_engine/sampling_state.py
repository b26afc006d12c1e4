"""Sampling parameters and used tokens of the sequences that decode, kept on the device.

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
class Kept(Generic[_Value]):
    """A value that is made once for the sequences of steps that follow each other."""

    sequences: tuple[Sequence, ...] = ()
    value: _Value | None = None

    def of(self, sequences: Items[Sequence], make: Callable[[], _Value]) -> _Value:
        """Return the value for ``sequences``, which ``make`` returns where they are others."""
        if self.value is None or not same(self.sequences, sequences):
            self.value, self.sequences = make(), tuple(sequences)
        return self.value


class SamplingState:
    """The batches of steps, each of which goes on from the one before.

    Where a step draws for the same sequences, their new tokens are counted in the tensors that are
    there. Where one comes or goes, its parameters are written in a stage of their own, and the used
    tokens of the others stay where they are known: on the device.
    """

    def __init__(self, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: tuple[Sequence, ...] = ()
        self._counted: list[int] = []  # tokens of each output that are in the batch
        self._batch: SamplingBatch | None = None

    def batch(self, sequences: Items[Sequence]) -> SamplingBatch:
        """Return the parameters of a row of logits for each of ``sequences``.

        They are as the sequences stand until the next call, which changes them.

        Args:
            sequences: not all of which take the likeliest token.
        """
        if self._batch is not None:
            self._count(self._batch)
        if self._batch is None or not same(self._sequences, sequences):
            self._batch = self._exchanged(sequences)
            self._sequences = tuple(sequences)
            self._counted = [len(sequence.output) for sequence in sequences]
        return self._batch

    def _count(self, batch: SamplingBatch) -> None:
        """Count the tokens that came since the last step."""
        more = [len(s.output) - n for s, n in zip(self._sequences, self._counted, strict=True)]
        if not any(more):
            return
        if len({*more}) == 1:
            batch.steps.add_(more[0])
        else:
            batch.steps.add_(torch.tensor(more).to(self._device, non_blocking=True))
        if batch.penalties is not None:
            pairs = [
                (row, token)
                for row, (sequence, count) in enumerate(
                    zip(self._sequences, self._counted, strict=True)
                )
                for token in sequence.output[count:]
            ]
            places = torch.tensor(pairs).T.to(self._device, non_blocking=True)
            counts = batch.penalties.output_counts
            ones = torch.ones(len(pairs), dtype=counts.dtype, device=counts.device)
            counts.index_put_(tuple(places), ones, accumulate=True)
        self._counted = [n + new for n, new in zip(self._counted, more, strict=True)]

    def _exchanged(self, sequences: Items[Sequence]) -> SamplingBatch:
        """Return the batch of other sequences, some of which may be known."""
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        if not any(sequence.params.is_penalised for sequence in sequences):
            return batch
        held = None if self._batch is None else self._batch.penalties
        known = {} if held is None else {s: row for row, s in enumerate(self._sequences)}
        fresh = [sequence for sequence in sequences if sequence not in known]
        made = penalties_of(fresh, self._vocab_size, self._device) if fresh else None
        if held is None or len(fresh) == len(sequences):
            return replace(batch, penalties=made)
        starts = {sequence: len(known) + row for row, sequence in enumerate(fresh)} | known
        rows = torch.tensor([starts[sequence] for sequence in sequences], device=self._device)
        return replace(batch, penalties=_joined(held, made, rows))


def same(held: Items[Sequence], given: Items[Sequence]) -> bool:
    """Say whether these are the same sequences in the same order."""
    return len(held) == len(given) and all(a is b for a, b in zip(held, given, strict=True))


def _joined(held: Penalties, made: Penalties | None, rows: Tensor) -> Penalties:
    """Return the rows of both, those of ``made`` numbered behind the others."""
    names = Penalties.__dataclass_fields__
    if made is None:
        return Penalties(*(getattr(held, name)[rows] for name in names))
    return Penalties(*(torch.cat([getattr(held, n), getattr(made, n)])[rows] for n in names))
