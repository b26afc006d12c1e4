"""Memory that is shared with the process of a kernel."""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from interposer.errors import ConfigError

# Only touched pages take memory.
_SIZE_BYTES = 1 << 35
_PAGE = mmap.PAGESIZE
# Allocations start a random number of pages apart, so that addresses do not repeat.
_MAX_GAP_PAGES = 8


class SharedMemory:
    """A large area of memory that two processes map; buffers are allocated one after another.

    Attributes:
        descriptor: file descriptor of the memory, which another process can map.
        protected: offsets of the pages that no kernel may touch, next to fenced buffers.
    """

    def __init__(self) -> None:
        """Create the memory.

        Raises: ConfigError: this system is not Linux.
        """
        if sys.platform != "linux":
            raise ConfigError(
                f"kernels can be called in another process on Linux only, this is {sys.platform}. "
                "Try: judge them in a container or a virtual machine with Linux"
            )
        self.descriptor = os.memfd_create("data")
        os.ftruncate(self.descriptor, _SIZE_BYTES)
        self._memory = mmap.mmap(self.descriptor, _SIZE_BYTES)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8, count=1)
        self._base = whole.data_ptr()
        self._next = 0
        self._random = random.Random()
        self.protected: list[int] = []

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)

    def allocate(self, num_bytes: int, fence: str = "") -> torch.Tensor:
        """Allocate a buffer with all bits set.

        Args:
            num_bytes: size of the buffer, a multiple of 64.
            fence: "before" or "after": put the buffer next to a protected page.
        Returns: ``[num_bytes]`` uint8, with a storage of its own.
        """
        length = -(-num_bytes // _PAGE) * _PAGE
        start = self._next + _PAGE * self._random.randrange(1, _MAX_GAP_PAGES)
        self._next = start + length + _PAGE
        if self._next > _SIZE_BYTES:
            raise MemoryError(f"arguments take more than {_SIZE_BYTES >> 30} GiB")
        if fence == "after":
            self.protected.append(start + length)
            start += length - num_bytes
        elif fence == "before":
            self.protected.append(start - _PAGE)
        return self.view(start, num_bytes).fill_(255)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes from ``offset``, ``[num_bytes]`` uint8, with a storage of their own."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)

    def offset_of(self, address: int) -> int | None:
        """Return the offset of an address in this process; None if it is other memory."""
        offset = address - self._base
        return offset if 0 <= offset < _SIZE_BYTES else None

    def contains(self, offset: int, num_bytes: int) -> bool:
        """Tell whether bytes from ``offset`` on are within the memory."""
        return 0 <= offset < _SIZE_BYTES and 0 < num_bytes <= _SIZE_BYTES - offset

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free all buffers of a block at its end; no tensor of them may be used afterwards."""
        start, protected = self._next, len(self.protected)
        try:
            yield
        finally:
            first = -(-start // _PAGE) * _PAGE
            if self._next > first:
                self._memory.madvise(mmap.MADV_REMOVE, first, self._next - first)
            self._next = start
            del self.protected[protected:]
