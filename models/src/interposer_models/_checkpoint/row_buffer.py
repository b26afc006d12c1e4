"""The memory of a parameter, as a buffer for a stored tensor that arrives some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interposer_models._checkpoint.tensor_places import TensorPlace
from interposer_ops.layers.cuts import Slice


@dataclass(frozen=True, slots=True, eq=False)
class RowBuffer:
    """Memory for this rank's shard of a stored tensor, written row by row.

    Rows are entries of the first dimension of the stored tensor.

    Attributes:
        entries: the memory of the shard, as a view in the layout of the stored tensor.
        dim: dimension of the stored tensor that ``slice`` divides.
        slice: the shard of this rank; None if the tensor is replicated.
    """

    entries: torch.Tensor
    dim: int
    slice: Slice | None

    @classmethod
    def of(cls, place: TensorPlace, parameter_data: torch.Tensor) -> RowBuffer:
        """Return the buffer for the tensor of ``place``, inside the parameter's data."""
        dim = 0 if place.slice is None else place.stored_dim(place.slice.dim)
        return cls(place.stored(parameter_data), dim, place.slice)

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory for stored rows ``start`` to ``stop``.

        Returns: None unless the rows are contiguous and belong to this rank entirely.
        """
        if self.slice is not None:
            if self.dim:
                return None  # this rank has a part of each row
            containing = [
                (offset, lower)
                for offset, lower, upper in self._ranges()
                if lower <= start and stop <= upper
            ]
            if not containing:
                return None
            offset, lower = containing[0]
            start, stop = offset + start - lower, offset + stop - lower
        rows = self.entries[start:stop]
        return rows if rows.is_contiguous() else None

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Copy this rank's part of stored rows that begin at row ``start``."""
        stop = start + len(rows)
        if self.slice is None:
            self.entries[start:stop].copy_(rows)
        elif self.dim:
            # Sharded along columns: every row has a part for this rank.
            self.entries[start:stop].copy_(self.slice.of(rows, self.dim))
        else:
            for offset, lower, upper in self._ranges():
                first, last = max(start, lower), min(stop, upper)
                if first < last:
                    target = self.entries[offset + first - lower : offset + last - lower]
                    target.copy_(rows[first - start : last - start])

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(offset in entries, first stored row, last stored row + 1)`` of each range."""
        assert self.slice is not None
        ranges, offset = [], 0
        for lower, upper in self.slice.ranges:
            ranges.append((offset, lower, upper))
            offset += upper - lower
        return ranges
