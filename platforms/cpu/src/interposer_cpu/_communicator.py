"""Collectives of the processes of one host, through memory that they share.

Dimensions: N ranks, T rows, H hidden.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, empty_like
from torch.compiler import is_compiling

from interposer import Communicator, Ranks, Request, Verdict
from interposer.errors import RankError, RequestError
from interposer_cpu import _collective_ops as ops
from interposer_cpu import native
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._segment import join_ranks

__all__ = ["SharedMemoryCommunicator", "judge"]

_SUMMED = {**TYPES, torch.float64: 8, torch.int32: 9, torch.int64: 10}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _SUMMED}
_SUMS = ("all_reduce", "reduce_scatter")
_NORMED = tuple(str(dtype).removeprefix("torch.") for dtype in TYPES)

# Kinds of interposer_lost; those of one rank alone are above the shared ones.
_LATE, _CLOSED = 1, 6
_REASONS = {
    2: "ended its process",
    3: "calls another collective, or one of other sizes or another dtype",
    4: "was interrupted by a signal",
    5: "closed its communicator",
}


def judge(request: Request) -> Verdict:
    """Accept sums of the dtypes that the library adds up, and copies of all."""
    if request.name in _SUMS and request.dtype not in ("", *_NAMES):
        return Verdict.refuse(f"adds up {', '.join(_NAMES)}, not {request.dtype}")
    if request.name == "all_reduce_add_rms_norm" and request.dtype not in ("", *_NORMED):
        return Verdict.refuse(f"normalises {', '.join(_NORMED)}, not {request.dtype}")
    return native.judge(request)


class SharedMemoryCommunicator(Communicator):
    """Collectives of ranks on one host: each writes to its slot, and reads those of the others.

    Sums are taken in the order of the ranks, in float32 or wider, and rounded once. Tensors with
    gaps are copied. A wait takes the processor for some microseconds, then offers it to others, and
    sleeps after half a millisecond.

    Raises:
        ConfigError: the ranks can share no memory.
        RankError: a rank was lost meanwhile.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        self._native = library = native.library()
        self._all_reduce = library.all_reduce
        self._left: weakref.finalize[..., SharedMemoryCommunicator] | None = None
        self._number = ops.number_of(self)

    @property
    def address(self) -> int:
        """The interposer_communicator that native code calls; 0 once it is closed.

        The first use meets the other ranks.
        """
        return self._address

    def check(self, call: str, lost: int) -> None:
        """Raise RankError unless native code returned 0 of interposer_lost for a call."""
        if lost:
            raise self._error(call, lost)

    @cached_property
    def _address(self) -> int:
        """The memory that ranks share, an attribute like any other once they have met in it."""
        address = join_ranks(self.ranks)
        self._left = weakref.finalize(self, _leave, address, os.getpid())
        return address

    def open(self) -> None:
        """Meet the other ranks."""
        self._address  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``, which holds the sum over the ranks, rounded once."""
        if is_compiling():
            ops.all_reduce_(x, self._number)
            return x
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        kind = _SUMMED.get(x.dtype)
        if kind is None:
            raise self._unsummed("all_reduce", x)
        if lost := self._all_reduce(self._address, x.data_ptr(), kind, x.numel()):
            raise self._error("all_reduce", lost)
        return x

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the op ``fused_add_rms_norm`` of the sum of ``x`` over the ranks.

        The bits are those of ``all_reduce`` and the library's kernel of that op.

        Args:
            x: ``[T, H]``, float32, bfloat16 or float16; may be overwritten.
            residual: ``[T, H]``, of that dtype or float32; the same on every rank.
            weight: ``[H]``, of the dtype of ``x``.
        Returns: the normed rows, and the new residual.
        """
        if is_compiling():
            return ops.all_reduce_add_rms_norm(x, residual, weight, eps, self._number)  # type: ignore[no-any-return]
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        if x.dtype not in TYPES or residual.dtype not in (x.dtype, torch.float32):
            raise self._unsummed("all_reduce_add_rms_norm", x)
        out, total = empty_like(x), empty_like(residual)
        lost = self._native.all_reduce_add_rms_norm(
            self._address,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            TYPES[x.dtype],
            TYPES[residual.dtype],
            x.numel(),
            weight.numel(),
            eps,
        )
        if lost:
            raise self._error("all_reduce_add_rms_norm", lost)
        return out, total

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in their order, ``[sum(sizes), ...]``."""
        if is_compiling():
            return ops.all_gather(x, sizes, self._number)  # type: ignore[no-any-return]
        self._check_rows("all_gather", x, sizes, sizes[self.ranks.rank])
        x, row = x.contiguous(), x.shape[1:].numel() * x.element_size()
        out = x.new_empty(sum(sizes), *x.shape[1:])
        num_bytes = [size * row for size in sizes]
        self._call("all_gather", x.data_ptr(), out.data_ptr(), *num_bytes)
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum, which is rounded once."""
        if is_compiling():
            return ops.reduce_scatter(x, sizes, self.ranks.rank, self._number)  # type: ignore[no-any-return]
        self._check_rows("reduce_scatter", x, sizes, sum(sizes))
        kind = _SUMMED.get(x.dtype)
        if kind is None:
            raise self._unsummed("reduce_scatter", x)
        x, row = x.contiguous(), x.shape[1:].numel()
        out = x.new_empty(sizes[self.ranks.rank], *x.shape[1:])
        counts = [size * row for size in sizes]
        self._call("reduce_scatter", x.data_ptr(), out.data_ptr(), kind, *counts)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that the ranks have for this one, in their order."""
        if is_compiling():
            return ops.all_to_all(x, sent, received, self._number)  # type: ignore[no-any-return]
        self._check_rows("all_to_all", x, sent, sum(sent))
        self._check_rows("all_to_all", x, received, len(x))  # how many numbers there are
        x, row = x.contiguous(), x.shape[1:].numel() * x.element_size()
        out = x.new_empty(sum(received), *x.shape[1:])
        num_bytes = [size * row for size in (*sent, *received)]
        self._call("all_to_all", x.data_ptr(), out.data_ptr(), *num_bytes)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return ``x``, written to that of the rank ``source`` on the others."""
        if is_compiling():
            ops.broadcast_(x, source, self._number)
            return x
        if not 0 <= source < self.ranks.size:
            raise RequestError(f"broadcast from rank {source}, of {self.ranks.size} ranks from 0")
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), source))
        self._call("broadcast", x.data_ptr(), x.nbytes, source)
        return x

    def close(self) -> None:
        """Give back the memory, and tell others that wait for this rank; once, however often."""
        self._address = 0
        if self._left is not None:
            self._left()

    def _call(self, collective: str, *numbers: int) -> None:
        if lost := getattr(self._native, collective)(self._address, *numbers):
            raise self._error(collective, lost)

    def _error(self, collective: str, lost: int) -> RankError:
        """Return what is told of a call that the library did not end."""
        rank = self.ranks.rank
        if lost == _CLOSED:
            return RankError(rank, f"{collective}: the communicator is closed")
        kind, teller, bits = self._native.rank_failure(self._address)
        about = [other for other in range(self.ranks.size) if bits >> other & 1]
        late = f"did not come within {self.ranks.timeout_seconds:g} s"
        reason = late if kind == _LATE else _REASONS[kind]
        who = f"rank {about[0]}" if len(about) == 1 else f"each of the ranks {about}"
        return RankError(
            rank,
            f"{collective}: {who} {reason}, as rank {teller} found. Try: read the end of what "
            "that rank printed, and start all ranks anew",
            about,
        )

    def _unsummed(self, collective: str, x: Tensor) -> RequestError:
        return RequestError(
            f"{collective} of {x.dtype} through shared memory. Try: one of {', '.join(_NAMES)}"
        )

    def _check_rows(self, collective: str, x: Tensor, sizes: Sequence[int], rows: int) -> None:
        given = x.shape[0] if x.dim() else None
        if len(sizes) != self.ranks.size or min(sizes) < 0 or given != rows:
            raise RequestError(
                f"{collective} of {[*x.shape]} with rows {[*sizes]} on rank {self.ranks.rank} of "
                f"{self.ranks.size}. Try: a number of rows for each rank, of which x has {rows}"
            )


def _leave(address: int, process: int) -> None:
    # A copy of the process that was forked is no rank.
    if os.getpid() == process:
        native.library().leave_ranks(address)
