"""Collectives of torch.distributed for uneven sizes, any layout and any dtype.

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

# Dtypes that every backend can sum; other dtypes are summed here.
_BACKEND_SUM_DTYPES = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64}
)


class TorchCommunicator(Communicator):
    """Collectives of a process group: gloo in host memory, or the platform's own backend.

    Ranks of different platforms exchange data over host memory. ``all_reduce`` sums as the backend
    does, in the tensor's dtype; ``reduce_scatter`` sums in float32 in the order of the ranks.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        staged = ranks.backend == "gloo" and torch.device(device).type != "cpu"
        self._transfer_device = torch.device("cpu" if staged else device)

    @cached_property
    def _own(self) -> RankGroup:
        return RankGroup(self.ranks)

    def open(self) -> None:
        """Create the process group together with the other ranks."""
        self._own  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks in place, and return ``x``."""
        if x.dtype not in _BACKEND_SUM_DTYPES:
            return self._ordered_sum(x)
        sent = self._to_backend(x)
        with self._own.guarded("all_reduce"):
            dist.all_reduce(sent, group=self._own.group)
        return x if sent is x else x.copy_(sent)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in rank order, ``[sum(sizes), ...]``."""
        check_row_counts(self.ranks, "all_gather", x, sizes, sizes[self.ranks.rank])
        max_rows = max(sizes)
        row_bytes = _row_bytes(x)
        sent = _as_bytes(self._to_backend(x))
        if len(x) < max_rows:  # backends gather only equal sizes
            sent = torch.cat([sent, sent.new_zeros((max_rows - len(x)) * row_bytes)])
        gathered = sent.new_empty(self.ranks.size, max_rows * row_bytes)
        if gathered.numel():
            with self._own.guarded("all_gather"):
                dist.all_gather(list(gathered), sent, group=self._own.group)
        if min(sizes) == max_rows:
            return self._from_bytes(gathered, x, sum(sizes))
        rows = [part[: size * row_bytes] for part, size in zip(gathered, sizes, strict=True)]
        return self._from_bytes(torch.cat(rows), x, sum(sizes))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum ``x`` over the ranks, rounded once, and return this rank's rows."""
        # Exchange all parts and sum locally: the order of summation is then that of the ranks.
        check_row_counts(self.ranks, "reduce_scatter", x, sizes, sum(sizes))
        size = sizes[self.ranks.rank]
        parts = self.all_to_all(x, sizes, [size] * self.ranks.size)
        return sum_of_parts(parts.reshape(self.ranks.size, size, *x.shape[1:]))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every rank; return the rows received from the ranks, in rank order."""
        check_row_counts(self.ranks, "all_to_all", x, sent, sum(sent))
        check_row_counts(self.ranks, "all_to_all", x, received, len(x))
        row_bytes, sent_rows = _row_bytes(x), _as_bytes(self._to_backend(x))
        received_rows = sent_rows.new_empty(sum(received) * row_bytes)
        with self._own.guarded("all_to_all"):
            dist.all_to_all_single(
                received_rows,
                sent_rows,
                [size * row_bytes for size in received],
                [size * row_bytes for size in sent],
                group=self._own.group,
            )
        return self._from_bytes(received_rows, x, sum(received))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Copy ``x`` of the rank ``source`` to ``x`` of all ranks, and return ``x``."""
        if not 0 <= source < self.ranks.size:
            raise RequestError(f"broadcast from rank {source}, of {self.ranks.size} ranks from 0")
        sent = self._to_backend(x)
        with self._own.guarded("broadcast"):
            dist.broadcast(_as_bytes(sent), group_src=source, group=self._own.group)
        return x if sent is x else x.copy_(sent)

    def close(self) -> None:
        """Destroy the process group; closing twice is harmless."""
        if "_own" in vars(self):
            self._own.close()

    def _ordered_sum(self, x: Tensor) -> Tensor:
        """Sum ``x`` in place in float32 in the order of the ranks, rounded once.

        Each rank sums a shard of the elements, so that all ranks get the same bits.
        """
        flat, num_ranks = x.reshape(-1), self.ranks.size
        shard = -(-flat.numel() // num_ranks)
        sizes = [max(0, min(shard, flat.numel() - rank * shard)) for rank in range(num_ranks)]
        # Not self.reduce_scatter: a subclass may sum in another order.
        local_sum = TorchCommunicator.reduce_scatter(self, flat, sizes)
        return x.copy_(TorchCommunicator.all_gather(self, local_sum, sizes).view(x.shape))

    def _to_backend(self, x: Tensor) -> Tensor:
        """Return ``x``, or a contiguous copy on the device from which the backend sends."""
        return x.to(self._transfer_device).contiguous()

    def _from_bytes(self, data: Tensor, x: Tensor, num_rows: int) -> Tensor:
        """Convert received bytes to rows with the dtype, row shape and device of ``x``."""
        flat = data.view(-1).view(x.dtype)
        return flat.view(num_rows, *x.shape[1:]).to(x.device)


def check_row_counts(
    ranks: Ranks, collective: str, x: Tensor, sizes: Sequence[int], rows: int
) -> None:
    """Check the arguments of a collective that moves a number of rows per rank.

    Args:
        collective: name of the collective, for the error.
        sizes: number of rows of each rank.
        rows: number of rows that ``x`` must have.
    Raises: RequestError: ``sizes`` has not one number per rank, or ``x`` has other rows.
    """
    num_rows = x.shape[0] if x.dim() else None
    if len(sizes) != ranks.size or min(sizes) < 0 or num_rows != rows:
        raise RequestError(
            f"{collective} of {[*x.shape]} with rows {[*sizes]} on rank {ranks.rank} of "
            f"{ranks.size}. Try: one number of rows per rank, and an x of {rows} rows"
        )


def sum_of_parts(parts: Tensor) -> Tensor:
    """Sum over the first dimension in order, in float32 or wider, rounded once.

    ``Tensor.sum`` would sum in an order that depends on the number of elements.

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
    """View a contiguous tensor as uint8, a dtype that every backend can transfer."""
    return x.view(-1).view(torch.uint8)
