"""Memory that is shared with the process of a kernel."""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

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
        device: torch device of the memory.
        descriptor: file descriptor of the memory, which another process can map.
        protected: offsets of the pages that no kernel may touch, next to fenced buffers.
        has_exports: the other process copies results into this memory, because this process cannot
            read other memory of the device.
    """

    device = "cpu"
    has_exports = False

    def __init__(self) -> None:
        """Create the shared memory and map it into this process.

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
        first_byte = torch.frombuffer(self._memory, dtype=torch.uint8, count=1)
        self._base = first_byte.data_ptr()
        self._size = self._argument_bytes = _SIZE_BYTES
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
        if self._next > self._argument_bytes:
            raise MemoryError(f"arguments take more than {self._argument_bytes / 2**30:.1f} GiB")
        # A buffer starts or ends at a page, so only one of its sides can touch a protected page.
        if fence == "after":
            self.protected.append(start + length)
            start += length - num_bytes
        elif fence == "before":
            self.protected.append(start - _PAGE)
        return self.view(start, num_bytes).fill_(255)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 view ``[num_bytes]`` of the memory at ``offset``, in its own storage."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)

    def offset_of(self, address: int) -> int | None:
        """Return the offset of an address within this memory; None for any other address."""
        offset = address - self._base
        return offset if 0 <= offset < self._size else None

    def contains(self, offset: int, num_bytes: int) -> bool:
        """Tell whether ``num_bytes`` bytes from ``offset`` are within the memory."""
        return 0 <= offset < self._size and 0 < num_bytes <= self._size - offset

    def layout(self) -> dict[str, Any]:
        """Return the facts that the other process needs to map the memory, as JSON values."""
        return {}

    def settle(self) -> None:
        """Wait until this process has finished its reads and writes of the memory."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free, at the end of a ``with`` block, all buffers that were allocated in the block."""
        start, protected = self._next, len(self.protected)
        try:
            yield
        finally:
            first = -(-start // _PAGE) * _PAGE
            if self._next > first:
                self._forget(first, self._next - first)
            self._next = start
            del self.protected[protected:]

    def _forget(self, offset: int, num_bytes: int) -> None:
        """Return a range of pages to the operating system."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, num_bytes)


class ExportedMemory(SharedMemory):
    """Shared memory whose second half receives copies of results."""

    has_exports = True

    def __init__(self) -> None:
        super().__init__()
        self._argument_bytes = self._size // 2

    def layout(self) -> dict[str, Any]:
        """Return the device and the offsets of the area for results, as JSON values."""
        return {"device": self.device, "exports": [self._argument_bytes, self._size]}


class DeviceMemory(ExportedMemory):
    """GPU memory that two processes map through CUDA IPC handles.

    This class has never run on a GPU. No page of it is protected: only the poison between the
    arguments shows accesses outside of them.
    """

    def __init__(self, device: str) -> None:
        """Allocate the memory: half of the free memory of the device, but at most 32 GiB.

        Raises: ConfigError: there is no such device.
        """
        if not torch.cuda.is_available():
            raise ConfigError(
                f"The device {device!r} is not available: torch {torch.__version__} finds no GPU "
                "with CUDA. Try: the device 'cpu', where Triton's interpreter runs Triton kernels"
            )
        super().__init__()
        self._size = min(_SIZE_BYTES, torch.cuda.mem_get_info(device)[0] // 2)
        self._argument_bytes = self._size // 2 // _PAGE * _PAGE
        self._arena = torch.empty(self._size, dtype=torch.uint8, device=device)
        self.device = str(self._arena.device)
        self._base = self._arena.data_ptr()

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 view ``[num_bytes]`` of the memory at ``offset``, in its own storage."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        if not num_bytes:
            return empty
        # A slice of the arena would share the storage of all arguments.
        storage = torch._C._construct_storage_from_data_pointer(
            self._base + offset, torch.device(self.device), num_bytes
        )
        return empty.set_(storage)

    def layout(self) -> dict[str, Any]:
        """Return device, offsets of the area for results, and CUDA IPC handle, as JSON values."""
        handle = self._arena.untyped_storage()._share_cuda_()
        texts = [["hex", part.hex()] if isinstance(part, bytes) else part for part in handle]
        return {**super().layout(), "handle": texts}

    def settle(self) -> None:
        """Wait until this process has finished its work on the device."""
        torch.cuda.synchronize(self.device)

    def _forget(self, offset: int, num_bytes: int) -> None:
        """Do nothing, because device memory stays mapped."""


def memory_of(device: str) -> SharedMemory:
    """Create the memory that a kernel for a device shares with the judge."""
    return SharedMemory() if device == "cpu" else DeviceMemory(device)
