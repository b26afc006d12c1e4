"""Collectives of torch.distributed with uneven sizes, any layout and any dtype.

Dimensions: N ranks, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from interposer import Communicator, Ranks
from interposer.errors import RequestError
from interposer_ops.communicators._group import RankGroup

# The dtypes that each backend adds up; others are added here.
_SUMMED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64}
)


class TorchCommunicator(Communicator):
    """Collectives of a process group: gloo in the host's memory, else that of the platform.

    Ranks of several platforms go through the host's memory. ``all_reduce`` adds up as the backend
    does, in the dtype; ``reduce_scatter`` adds up in float32 in the order of the ranks.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        staged = ranks.backend == "gloo" and torch.device(device).type != "cpu"
        self._place = torch.device("cpu" if staged else device)

    @cached_property
    def _own(self) -> RankGroup:
        return RankGroup(self.ranks)

    def open(self) -> None:
        """Meet the other ranks."""
        self._own  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``, which holds the sum over the ranks."""
        if x.dtype not in _SUMMED:
            return self._ordered_sum(x)
        there = self._there(x)
        with self._own.guarded("all_reduce"):
            dist.all_reduce(there, group=self._own.group)
        return x if there is x else x.copy_(there)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in their order, ``[sum(sizes), ...]``."""
        self._check_rows("all_gather", x, sizes, sizes[self.ranks.rank])
        most = max(sizes)
        row = _row_bytes(x)
        mine = _as_bytes(self._there(x))
        if len(x) < most:  # backends gather equal sizes alone
            mine = torch.cat([mine, mine.new_zeros((most - len(x)) * row)])
        found = mine.new_empty(self.ranks.size, most * row)
        if found.numel():
            with self._own.guarded("all_gather"):
                dist.all_gather(list(found), mine, group=self._own.group)
        if min(sizes) == most:
            return self._back(found, x, sum(sizes))
        rows = [part[: size * row] for part, size in zip(found, sizes, strict=True)]
        return self._back(torch.cat(rows), x, sum(sizes))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum, which is rounded once."""
        self._check_rows("reduce_scatter", x, sizes, sum(sizes))
        size = sizes[self.ranks.rank]
        parts = self.all_to_all(x, sizes, [size] * self.ranks.size)
        return sum_of_parts(parts.reshape(self.ranks.size, size, *x.shape[1:]))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that the ranks have for this one, in their order."""
        self._check_rows("all_to_all", x, sent, sum(sent))
        self._check_rows("all_to_all", x, received, len(x))
        row, mine = _row_bytes(x), _as_bytes(self._there(x))
        found = mine.new_empty(sum(received) * row)
        with self._own.guarded("all_to_all"):
            dist.all_to_all_single(
                found,
                mine,
                [size * row for size in received],
                [size * row for size in sent],
                group=self._own.group,
            )
        return self._back(found, x, sum(received))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return ``x``, written to that of the rank ``source`` on the others."""
        if not 0 <= source < self.ranks.size:
            raise RequestError(f"broadcast from rank {source}, of {self.ranks.size} ranks from 0")
        there = self._there(x)
        with self._own.guarded("broadcast"):
            dist.broadcast(_as_bytes(there), group_src=source, group=self._own.group)
        return x if there is x else x.copy_(there)

    def close(self) -> None:
        """Give back the process group; doing so twice does nothing."""
        if "_own" in vars(self):
            self._own.close()

    def _ordered_sum(self, x: Tensor) -> Tensor:
        """Write the sum to ``x``, added up in float32 in the order of the ranks, rounded once.

        Each rank adds up its share of the elements, so that all get the same bits.
        """
        flat, num = x.reshape(-1), self.ranks.size
        share = -(-flat.numel() // num)
        sizes = [max(0, min(share, flat.numel() - rank * share)) for rank in range(num)]
        mine = TorchCommunicator.reduce_scatter(self, flat, sizes)
        return x.copy_(TorchCommunicator.all_gather(self, mine, sizes).view(x.shape))

    def _there(self, x: Tensor) -> Tensor:
        """Return ``x`` itself where the backend can take it, else a copy that it can."""
        return x.to(self._place).contiguous()

    def _back(self, found: Tensor, x: Tensor, num_rows: int) -> Tensor:
        """Return rows like those of ``x``, on its device, from their bytes."""
        flat = found.view(-1).view(x.dtype)
        return flat.view(num_rows, *x.shape[1:]).to(x.device)

    def _check_rows(self, collective: str, x: Tensor, sizes: Sequence[int], rows: int) -> None:
        given = x.shape[0] if x.dim() else None
        if len(sizes) != self.ranks.size or min(sizes) < 0 or given != rows:
            raise RequestError(
                f"{collective} of {[*x.shape]} with rows {[*sizes]} on rank {self.ranks.rank} of "
                f"{self.ranks.size}. Try: a number of rows for each rank, of which x has {rows}"
            )


def sum_of_parts(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension in its order, in float32 or wider, rounded once.

    ``Tensor.sum`` would add up in an order that depends on how many elements there are.

    Args:
        parts: ``[N, ...]``.
    """
    wide = parts.dtype
    if wide.is_floating_point and wide.itemsize < torch.float32.itemsize:
        wide = torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(parts.dtype)


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * x.shape[1:].numel()


def _as_bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, of a dtype that every backend moves."""
    return x.view(-1).view(torch.uint8)
