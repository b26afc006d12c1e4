"""The memory of a parameter for a stored tensor that comes some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interposer_models._checkpoint.tensor_places import TensorPlace
from interposer_ops.layers.cuts import Slice


@dataclass(frozen=True, slots=True, eq=False)
class RowRoom:
    """A room for the rows, along the first dimension, of a tensor as it is stored.

    Attributes:
        entries: the memory for the share of this rank, as the tensor is stored.
        dim: of ``slice``, as the tensor is stored.
        slice: the share of this rank; None: all of the tensor.
    """

    entries: torch.Tensor
    dim: int
    slice: Slice | None

    @classmethod
    def of(cls, place: TensorPlace, whole: torch.Tensor) -> RowRoom:
        """Return the room at a place of ``whole``, which takes rows."""
        dim = 0 if place.slice is None else place.stored_dim(place.slice.dim)
        return cls(place.stored(whole), dim, place.slice)

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory of these rows if this rank has all of them, in one piece."""
        if self.slice is not None:
            if self.dim:
                return None
            held = [
                (at, lower) for at, lower, upper in self._held() if lower <= start and stop <= upper
            ]
            if not held:
                return None
            at, lower = held[0]
            start, stop = at + start - lower, at + stop - lower
        rows = self.entries[start:stop]
        return rows if rows.is_contiguous() else None

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Copy what this rank has of some rows."""
        stop = start + len(rows)
        if self.slice is None:
            self.entries[start:stop].copy_(rows)
        elif self.dim:
            self.entries[start:stop].copy_(self.slice.of(rows, self.dim))
        else:
            for at, lower, upper in self._held():
                first, last = max(start, lower), min(stop, upper)
                if first < last:
                    own = self.entries[at + first - lower : at + last - lower]
                    own.copy_(rows[first - start : last - start])

    def _held(self) -> list[tuple[int, int, int]]:
        """Return where each range lies in the entries, its start and its stop."""
        assert self.slice is not None
        found, at = [], 0
        for lower, upper in self.slice.ranges:
            found.append((at, lower, upper))
            at += upper - lower
        return found
