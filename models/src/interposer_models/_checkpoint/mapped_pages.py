"""Returns pages of a memory-mapped file to the system after use, while the file stays mapped."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch


class MappedPages:
    """Address ranges at which this process has mapped a file; empty except on Linux.

    A dropped page is read from the file again at the next access, so that only changes that this
    process made to the page are lost.
    """

    def __init__(self, path: Path) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._library = None
        if sys.platform != "linux":
            return
        self._library = ctypes.CDLL(None)
        name = str(path.resolve())
        # A line is "start-end permissions offset device inode path"; a file can have several.
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, fields = line.partition(" ")
            if fields.endswith(f" {name}"):
                start, end = (int(edge, 16) for edge in addresses.split("-"))
                self._ranges.append((start, end))

    def drop(self, tensor: torch.Tensor) -> None:
        """Return the pages entirely inside ``tensor`` to the system, if they belong to the file."""
        # Round inwards: the first and last page may hold parts of other tensors.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and any(first <= start and end <= last for first, last in self._ranges):
            assert self._library is not None
            address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            self._library.madvise(address, size, mmap.MADV_DONTNEED)
