"""The state of recurrent layers: its layout, and the sequences of a step as such layers see them.

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
    """The tensors that one layer keeps of each sequence; they do not grow with its length.

    Attributes:
        parts: shape and dtype of each tensor, for one sequence.
    """

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def slot_bytes(self) -> int:
        """Return the bytes of one sequence."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def allocate(
        self,
        num_slots: int,
        device: str,
        empty: Callable[[Sequence[int], torch.dtype, str], Tensor] = _empty,
    ) -> tuple[Tensor, ...]:
        """Return a tensor ``[N, ...]`` of each part.

        They are not initialised: the state of a sequence begins with zeros, whatever is there.

        Args:
            empty: returns uninitialised memory of a shape and dtype on a device.
        """
        return tuple(empty((num_slots, *shape), dtype, device) for shape, dtype in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """The sequences of a step, concatenated without padding; the plan of layers with a state.

    Attributes:
        query_starts: ``[B + 1]`` int64; sequence b's tokens go from entry b to before entry b + 1.
        slots: ``[B]`` int64, the row of the state that each sequence has. A negative one is
            padding, whose state is neither read nor written.
        num_cached: ``[B]`` int64, tokens of the sequence before this step; where there are none,
            the state begins with zeros.
        max_query_tokens: the longest query of the batch.
        host: the same batch in host memory, where whoever made it had it there.
    """

    version: ClassVar[int] = 1

    query_starts: Tensor
    slots: Tensor
    num_cached: Tensor
    max_query_tokens: int
    host: StateBatch | None = None

    @classmethod
    def of(cls, batch: AttentionBatch) -> StateBatch:
        """Return what layers with a state need of a batch.

        Raises: MissingMemberError: it names no slots.
        """
        if batch.state_slots is None:
            raise MissingMemberError("the batch names no slots of states. Try: give state_slots")
        return cls(
            query_starts=batch.query_starts,
            slots=batch.state_slots,
            num_cached=batch.seq_lens - batch.query_starts.diff(),
            max_query_tokens=batch.max_query_tokens,
            host=None if batch.host is None else cls.of(batch.host),
        )

    def on_host(self) -> StateBatch:
        """Return the batch in host memory; where no copy came along, the device is waited for."""
        if self.host is not None or self.slots.device.type == "cpu":
            return self.host or self
        names = ("query_starts", "slots", "num_cached")
        return replace(self, **{name: getattr(self, name).cpu() for name in names})
