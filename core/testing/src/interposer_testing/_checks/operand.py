"""Tensor arguments in guarded memory, which detects reads and writes outside the tensor."""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Fence = Literal["", "before", "after"]
"""The side of an argument with a protected page of memory; any access there ends the process."""

Allocate = Callable[[int, Fence], torch.Tensor]
"""A function that allocates a number of bytes with all bits set, a multiple of 64, at a fence."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements on each side of the tensor, which show writes outside the tensor.
_MARGIN = 64
# The alignment of torch's allocations.
_ALIGNMENT_BYTES = 64
_NO_ACCESS = 0  # PROT_NONE of mprotect


class Operand:
    """A copy of a tensor with the same strides, in a buffer of its own.

    All buffer elements outside the tensor (before, after and between the elements) have all bits
    set, which is NaN in every float dtype. So a read outside the tensor changes the result, and
    ``strays`` counts writes outside the tensor.

    Attributes:
        tensor: the copy.
    """

    def __init__(
        self,
        value: torch.Tensor,
        device: str,
        fence: Fence = "",
        allocate: Allocate | None = None,
    ) -> None:
        """Copy ``value`` with its strides into a new guarded buffer.

        Args:
            allocate: allocates the buffer; by default ordinary memory of ``device``.
            fence: protect the memory before or after the tensor, at a distance below 64 bytes, so
                that any access ends the process. Ignored except for host memory on Linux.
        """
        is_fenced = bool(fence) and device == "cpu" and sys.platform == "linux"
        start = int(value.storage_offset()) + (0 if is_fenced and fence == "before" else _MARGIN)
        steps = zip(value.shape, value.stride(), strict=True)
        covered = 1 + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
        dtype = _BITS[value.dtype.itemsize]
        if is_fenced or allocate is not None:
            bits = _buffer(start + covered, dtype, fence, allocate or _fenced)
        else:
            bits = torch.full((start + covered + _MARGIN,), -1, dtype=dtype)
        # Along dimensions of stride 0, all elements share memory: copy only the first.
        once = value.detach().cpu()[tuple(slice(0, 1 if s == 0 else None) for s in value.stride())]
        bits.as_strided(once.shape, value.stride(), start).copy_(once.view(bits.dtype))
        self._covered = torch.zeros(bits.shape, dtype=torch.bool)
        self._covered.as_strided(once.shape, value.stride(), start).fill_(True)
        is_in_place = is_fenced or allocate is not None
        self._before = bits.cpu().clone() if is_in_place else bits
        self._buffer = bits if is_in_place else bits.to(device, copy=True)
        # Not a view of the buffer, because tracing a call would then see the whole buffer.
        empty = torch.empty(0, dtype=value.dtype, device=device)
        storage = self._buffer.untyped_storage()
        self.tensor = empty.set_(storage, start, value.shape, value.stride())

    def is_changed(self) -> bool:
        """Return whether any bit of the buffer has changed."""
        return not torch.equal(self._buffer.cpu(), self._before)

    def is_written(self) -> bool:
        """Return whether any bit of the tensor has changed."""
        return bool((self._buffer.cpu() != self._before)[self._covered].any())

    def strays(self) -> int:
        """Count the elements that were written outside the tensor."""
        changed = self._buffer.cpu() != self._before
        return int((changed & ~self._covered).sum())


def _buffer(size: int, dtype: torch.dtype, fence: Fence, allocate: Allocate) -> torch.Tensor:
    """Allocate a buffer for ``size`` elements and a margin, with all bits set."""
    num_elements = size if fence == "after" else size + _MARGIN
    num_bytes = -(-num_elements * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return allocate(num_bytes, fence).view(dtype)


def _fenced(num_bytes: int, fence: Fence) -> torch.Tensor:
    """Allocate bytes that start (fence "before") or end (fence "after") at a protected page."""
    page = mmap.PAGESIZE
    length = -(-num_bytes // page) * page
    memory = mmap.mmap(-1, length + page)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    fence_start = start + (length if fence == "after" else 0)
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(fence_start), page, _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    first = length - num_bytes if fence == "after" else page
    # ``frombuffer`` with an offset, because a view's storage would start at the mapping.
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=first).fill_(255)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch fill uninitialised memory with NaN or the largest integer, within a block."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic impl")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
