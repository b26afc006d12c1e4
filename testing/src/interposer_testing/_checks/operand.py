"""Arguments in memory of their own that is poisoned around them and watched."""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Fence = Literal["", "before", "after"]
"""The side of an argument that a page of memory lies on which nobody may touch."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARGIN = 64
# What torch aligns memory to that it allocates.
_ALIGNMENT_BYTES = 64
_NO_ACCESS = 0


class Operand:
    """A copy of a tensor with its own strides, alone in a buffer.

    Every element of the buffer that the tensor does not cover, before, after and between, has all
    bits set, which is a NaN of any float dtype: reading it shows in the result, writing it shows
    in ``strays``.

    Attributes:
        tensor: the copy.
    """

    def __init__(self, value: torch.Tensor, device: str, fence: Fence = "") -> None:
        """Copy ``value``.

        Args:
            fence: whether the elements before or after those of ``value``, less than 64 bytes off,
                are ones that end the process when they are touched; in host memory, on Linux.
        """
        fenced = bool(fence) and device == "cpu" and sys.platform == "linux"
        start = int(value.storage_offset()) + (0 if fenced and fence == "before" else _MARGIN)
        steps = zip(value.shape, value.stride(), strict=True)
        covered = 1 + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
        dtype = _BITS[value.dtype.itemsize]
        if fenced:
            bits = _fenced(start + covered, dtype, fence)
        else:
            bits = torch.full((start + covered + _MARGIN,), -1, dtype=dtype)
        # Elements that share one place are written once.
        once = value.detach().cpu()[tuple(slice(0, 1 if s == 0 else None) for s in value.stride())]
        bits.as_strided(once.shape, value.stride(), start).copy_(once.view(bits.dtype))
        self._covered = torch.zeros(bits.shape, dtype=torch.bool)
        self._covered.as_strided(once.shape, value.stride(), start).fill_(True)
        self._before = bits.clone() if fenced else bits
        self._buffer = bits if fenced else bits.to(device, copy=True)
        # No view of the buffer: what traces a call would see the buffer behind it.
        empty = torch.empty(0, dtype=value.dtype, device=device)
        storage = self._buffer.untyped_storage()
        self.tensor = empty.set_(storage, start, value.shape, value.stride())

    def is_changed(self) -> bool:
        """Return True if any bit of the buffer has changed."""
        return not torch.equal(self._buffer.cpu(), self._before)

    def is_written(self) -> bool:
        """Return True if any bit of the tensor itself has changed."""
        return bool((self._buffer.cpu() != self._before)[self._covered].any())

    def strays(self) -> int:
        """Return how many elements outside the tensor were written."""
        changed = self._buffer.cpu() != self._before
        return int((changed & ~self._covered).sum())


def _fenced(size: int, dtype: torch.dtype, fence: Fence) -> torch.Tensor:
    """Return a buffer for ``size`` elements and some more, with all bits set, beside a fence."""
    page = mmap.PAGESIZE
    num_bytes = -(-(size + _MARGIN) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if fence == "after":  # what is left of the last line of a cache lies before it
        num_bytes = -(-size * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    length = -(-num_bytes // page) * page
    memory = mmap.mmap(-1, length + page)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    wall = start + (length if fence == "after" else 0)
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), page, _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    first = length - num_bytes if fence == "after" else page
    # No view: the storage has to begin there.
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=first)
        .fill_(255)
        .view(dtype)
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory that torch hands out uninitialised with NaN, or the largest integer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic impl")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
