"""State of recurrent layers: the layout, and the batch that such layers receive.

Dimensions: B sequences, N slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from interposer import AttentionBatch
from interposer.errors import MissingMemberError

__all__ = ["StateBatch", "StateLayout"]


def _empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The tensors that one recurrent layer keeps per sequence; sizes do not depend on the length.

    Attributes:
        parts: shape and dtype of each tensor, for one sequence.
    """

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def slot_bytes(self) -> int:
        """Return the bytes of one slot, which holds the state of one sequence."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def allocate(
        self,
        num_slots: int,
        device: str,
        empty: Callable[[Sequence[int], torch.dtype, str], Tensor] = _empty,
    ) -> tuple[Tensor, ...]:
        """Allocate a pool of N slots: one tensor ``[N, ...]`` per part of the state.

        The memory is uninitialised: layers start a sequence's state from zeros.

        Args:
            empty: allocates uninitialised memory of a shape and dtype on a device.
        """
        return tuple(empty((num_slots, *shape), dtype, device) for shape, dtype in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """The sequences of a step, concatenated without padding; the plan of recurrent layers.

    Attributes:
        query_starts: ``[B + 1]`` int64; the tokens of sequence b are entries b to b + 1
            (exclusive).
        slots: ``[B]`` int64, the state slot of each sequence. A negative slot is padding: no state
            is read or written.
        num_cached: ``[B]`` int64, tokens of the sequence before this step; 0: the state starts from
            zeros.
        max_query_tokens: the longest query of the batch.
        host: the same batch in host memory, if the engine has a copy.
    """

    version: ClassVar[int] = 1

    query_starts: Tensor
    slots: Tensor
    num_cached: Tensor
    max_query_tokens: int
    host: StateBatch | None = None

    @classmethod
    def of(cls, batch: AttentionBatch) -> StateBatch:
        """Extract the arguments of recurrent layers from an attention batch.

        Raises: MissingMemberError: the batch has no ``state_slots``.
        """
        if batch.state_slots is None:
            raise MissingMemberError(
                "the batch has no slots of recurrent states. Try: set state_slots"
            )
        return cls(
            query_starts=batch.query_starts,
            slots=batch.state_slots,
            # seq_lens include this step's tokens.
            num_cached=batch.seq_lens - batch.query_starts.diff(),
            max_query_tokens=batch.max_query_tokens,
            host=None if batch.host is None else cls.of(batch.host),
        )

    def on_host(self) -> StateBatch:
        """Return the batch in host memory; without a host copy, this waits for the device."""
        # A CPU batch is its own host copy.
        if self.host is not None or self.slots.device.type == "cpu":
            return self.host or self
        names = ("query_starts", "slots", "num_cached")
        return replace(self, **{name: getattr(self, name).cpu() for name in names})
