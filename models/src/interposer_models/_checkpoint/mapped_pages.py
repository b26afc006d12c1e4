"""The pages of a mapped file that were read, given back while the file stays mapped."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch


class MappedPages:
    """The places in memory where this process has mapped a file; none where nobody tells them.

    A page that is given back is read from the file again when somebody wants it, so that only what
    was written to it in this process is lost.
    """

    def __init__(self, path: Path) -> None:
        self._places: list[tuple[int, int]] = []
        self._library = None
        if sys.platform != "linux":
            return
        self._library = ctypes.CDLL(None)
        name = str(path.resolve())
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            place, _, rest = line.partition(" ")
            if rest.endswith(f" {name}"):
                begin, end = (int(edge, 16) for edge in place.split("-"))
                self._places.append((begin, end))

    def drop(self, tensor: torch.Tensor) -> None:
        """Give the whole pages of ``tensor`` back, if it lies in the file."""
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and any(first <= begin and end <= last for first, last in self._places):
            assert self._library is not None
            address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
            self._library.madvise(address, size, mmap.MADV_DONTNEED)
