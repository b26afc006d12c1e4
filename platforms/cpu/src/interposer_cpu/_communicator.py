"""Collectives of ranks on one host through shared memory.

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
from interposer_ops.communicators import check_row_counts

__all__ = ["SharedMemoryCommunicator", "judge"]

# The library's numbers of the dtypes of sums.
_SUM_TYPES = {**TYPES, torch.float64: 8, torch.int32: 9, torch.int64: 10}
_SUM_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _SUM_TYPES}
_SUM_OPS = ("all_reduce", "reduce_scatter")
_NORM_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in TYPES)

# Values of interposer_lost. Values from _CLOSED on concern this rank only, not all ranks.
_LATE, _CLOSED = 1, 6
_REASONS = {
    2: "ended its process",
    3: "calls another collective, or one of other sizes or another dtype",
    4: "was interrupted by a signal",
    5: "closed its communicator",
}


def judge(request: Request) -> Verdict:
    """Accept sums in the dtypes that the library adds, and copies in every dtype."""
    if request.name in _SUM_OPS and request.dtype not in ("", *_SUM_NAMES):
        return Verdict.refuse(f"adds up {', '.join(_SUM_NAMES)}, not {request.dtype}")
    if request.name == "all_reduce_add_rms_norm" and request.dtype not in ("", *_NORM_NAMES):
        return Verdict.refuse(f"normalises {', '.join(_NORM_NAMES)}, not {request.dtype}")
    return native.judge(request)


class SharedMemoryCommunicator(Communicator):
    """Collectives of ranks on one host: every rank writes its slot and reads all other slots.

    Sums are computed in rank order, in float32 or wider, and rounded once, so that all ranks get
    the same bits. Non-contiguous tensors are copied. A waiting rank spins for some microseconds,
    then yields the processor, and sleeps after half a millisecond.

    Raises:
        ConfigError: the ranks cannot share memory.
        RankError: a rank was lost.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        self._native = library = native.library()
        self._all_reduce = library.all_reduce
        self._finalizer: weakref.finalize[..., SharedMemoryCommunicator] | None = None
        self._number = ops.number_of(self)

    @property
    def address(self) -> int:
        """Address of the interposer_communicator that native code calls; 0 after ``close``.

        The first use waits for the other ranks.
        """
        return self._address

    def check(self, call: str, lost: int) -> None:
        """Raise RankError if a native collective reported a lost rank."""
        if lost:
            raise self._error(call, lost)

    @cached_property
    def _address(self) -> int:
        # Cached, so that later uses are plain attribute reads, and close() can set 0.
        address = join_ranks(self.ranks)
        self._finalizer = weakref.finalize(self, _leave, address, os.getpid())
        return address

    def open(self) -> None:
        """Join the ranks' shared memory; waits for the other ranks."""
        self._address  # noqa: B018 the first read joins the ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks in place, rounded once, and return ``x``."""
        if is_compiling():
            ops.all_reduce_(x, self._number)
            return x
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        kind = _SUM_TYPES.get(x.dtype)
        if kind is None:
            raise self._dtype_error("all_reduce", x)
        if lost := self._all_reduce(self._address, x.data_ptr(), kind, x.numel()):
            raise self._error("all_reduce", lost)
        return x

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Sum ``x`` over the ranks, then compute the op ``fused_add_rms_norm``.

        The bits equal those of ``all_reduce`` followed by the library's kernel of that op.

        Args:
            x: ``[T, H]``, float32, bfloat16 or float16; may be overwritten.
            residual: ``[T, H]``, dtype of ``x`` or float32; the same on every rank.
            weight: ``[H]``, dtype of ``x``.
        Returns: the normalized rows and the new residual.
        """
        if is_compiling():
            return ops.all_reduce_add_rms_norm(x, residual, weight, eps, self._number)  # type: ignore[no-any-return]
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        if x.dtype not in TYPES or residual.dtype not in (x.dtype, torch.float32):
            raise self._dtype_error("all_reduce_add_rms_norm", x)
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
        """Concatenate the rows of all ranks in rank order, ``[sum(sizes), ...]``."""
        if is_compiling():
            return ops.all_gather(x, sizes, self._number)  # type: ignore[no-any-return]
        check_row_counts(self.ranks, "all_gather", x, sizes, sizes[self.ranks.rank])
        x, row = x.contiguous(), x.shape[1:].numel() * x.element_size()
        out = x.new_empty(sum(sizes), *x.shape[1:])
        num_bytes = [size * row for size in sizes]
        self._call("all_gather", x.data_ptr(), out.data_ptr(), *num_bytes)
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum ``x`` over the ranks, rounded once, and return this rank's rows of the sum."""
        if is_compiling():
            return ops.reduce_scatter(x, sizes, self.ranks.rank, self._number)  # type: ignore[no-any-return]
        check_row_counts(self.ranks, "reduce_scatter", x, sizes, sum(sizes))
        kind = _SUM_TYPES.get(x.dtype)
        if kind is None:
            raise self._dtype_error("reduce_scatter", x)
        x, row = x.contiguous(), x.shape[1:].numel()
        out = x.new_empty(sizes[self.ranks.rank], *x.shape[1:])
        counts = [size * row for size in sizes]
        self._call("reduce_scatter", x.data_ptr(), out.data_ptr(), kind, *counts)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every rank and return the received rows in rank order."""
        if is_compiling():
            return ops.all_to_all(x, sent, received, self._number)  # type: ignore[no-any-return]
        check_row_counts(self.ranks, "all_to_all", x, sent, sum(sent))
        # Any number of received rows is valid; this checks that there is one number per rank.
        check_row_counts(self.ranks, "all_to_all", x, received, len(x))
        x, row = x.contiguous(), x.shape[1:].numel() * x.element_size()
        out = x.new_empty(sum(received), *x.shape[1:])
        num_bytes = [size * row for size in (*sent, *received)]
        self._call("all_to_all", x.data_ptr(), out.data_ptr(), *num_bytes)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite ``x`` on every rank with the ``x`` of rank ``source``, and return ``x``."""
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
        """Release the shared memory and notify waiting ranks; later calls do nothing."""
        self._address = 0
        if self._finalizer is not None:
            self._finalizer()

    def _call(self, collective: str, *numbers: int) -> None:
        if lost := getattr(self._native, collective)(self._address, *numbers):
            raise self._error(collective, lost)

    def _error(self, collective: str, lost: int) -> RankError:
        rank = self.ranks.rank
        if lost == _CLOSED:
            return RankError(rank, f"{collective}: the communicator is closed")
        kind, reporting_rank, bits = self._native.rank_failure(self._address)
        lost_ranks = [number for number in range(self.ranks.size) if bits >> number & 1]
        timeout = f"did not come within {self.ranks.timeout_seconds:g} s"
        reason = timeout if kind == _LATE else _REASONS[kind]
        subject = (
            f"rank {lost_ranks[0]}" if len(lost_ranks) == 1 else f"each of the ranks {lost_ranks}"
        )
        return RankError(
            rank,
            f"{collective}: {subject} {reason}, as rank {reporting_rank} found. Try: read the end "
            "of what that rank printed, and start all ranks anew",
            lost_ranks,
        )

    def _dtype_error(self, collective: str, x: Tensor) -> RequestError:
        return RequestError(
            f"{collective} of {x.dtype} through shared memory. Try: one of {', '.join(_SUM_NAMES)}"
        )


def _leave(address: int, process: int) -> None:
    # A forked child also runs this finalizer, but is not a rank.
    if os.getpid() == process:
        native.library().leave_ranks(address)
