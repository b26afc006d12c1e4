"""Reads weights of a packed file into buffers, bypassing the system's page cache."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from interposer_models._offload.ring import Filler
from interposer_models._packed.packed_file import HEADER_BYTES, PackedFileError

_PAGE_BYTES = 4096
_PIECE_BYTES = 4 << 20
_GAP_BYTES = 1 << 16  # reading across such a gap is faster than a request of its own
# Two requests keep a disk busy while one of them completes.
_NUM_THREADS = 2


class Extents:
    """Parts of a file that contain some memories, and the offsets of the memories in a buffer."""

    def __init__(self, memories: dict[int, tuple[int, int]]) -> None:
        """Compute parts of whole pages, and merge parts that are close to each other.

        Args:
            memories: ``(first byte after the header, number of bytes)`` by number of the memory.
        """
        # (start in the file, end in the file, offset in a buffer)
        self.parts: list[tuple[int, int, int]] = []
        self.offsets: dict[int, int] = {}
        for number, (start, num_bytes) in sorted(memories.items(), key=lambda item: item[1]):
            start += HEADER_BYTES
            end = -(-(start + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
            if self.parts and start <= self.parts[-1][1] + _GAP_BYTES:
                begin, last_end, offset = self.parts.pop()
                end = max(end, last_end)
            else:
                begin, offset = start // _PAGE_BYTES * _PAGE_BYTES, self.num_bytes
            self.parts.append((begin, end, offset))
            self.offsets[number] = offset + start - begin

    @property
    def num_bytes(self) -> int:
        """Size of a buffer for all parts, in bytes."""
        if not self.parts:
            return 0
        begin, end, offset = self.parts[-1]
        return offset + end - begin


class DiskReader(Filler):
    """Reads blocks of a file into buffers at fixed addresses, in threads.

    Reading through a mapping would cost a fault per page, and page cache that evicts resident
    weights. On file systems without direct I/O, the cached pages are released after reading.

    Raises: PackedFileError: the file cannot be opened.
    """

    def __init__(self, path: Path, blocks: Sequence[Extents], num_buffers: int) -> None:
        self._blocks = blocks
        size = -(-max(extents.num_bytes for extents in blocks) // _PIECE_BYTES) * _PIECE_BYTES
        # mmap aligns buffers to pages, which direct I/O requires.
        self._buffers = [_buffer(size) for _ in range(num_buffers)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        try:
            self._file, self.is_direct = _opened(path)
        except OSError as error:
            raise PackedFileError(f"{path} cannot be read: {error}") from error
        self._size = os.fstat(self._file).st_size
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "interposer-offload")
        weakref.finalize(self, _end, self._threads, self._file)

    def memory(self, buffer: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer as uint8, with a storage of its own."""
        return torch.frombuffer(
            self._buffers[buffer], dtype=torch.uint8, count=num_bytes, offset=offset
        )

    def fill(self, block: int, buffer: int) -> list[Future[None]]:
        """Start to read a block in threads."""
        view, futures = self._views[buffer], []
        for begin, end, part_offset in self._blocks[block].parts:
            # Pieces of one part are read by several threads at a time.
            for start in range(begin, end, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, end)
                offset = part_offset + start - begin
                piece = view[offset : offset + stop - start]
                futures.append(
                    self._threads.submit(
                        _read, self._file, piece, start, self._size, self.is_direct
                    )
                )
        return futures

    def wait(self, handle: Any) -> None:
        """Wait until a block has been read."""
        for future in handle:
            future.result()

    def done(self, buffer: int) -> None:
        """Do nothing: computation on the host is complete when a call returns."""


def _end(threads: ThreadPoolExecutor, file: int) -> None:
    threads.shutdown(cancel_futures=True)  # running reads must end before the file is closed
    os.close(file)


def _buffer(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _opened(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):  # the file system has no direct I/O
            return os.open(path, flags | direct), True
    return os.open(path, flags), False


def _read(file: int, part: memoryview, start: int, size: int, is_direct: bool) -> None:
    # ``size`` is the size of the file, which may end within the last page.
    done_bytes, needed_bytes = 0, min(len(part), size - start)
    while done_bytes < needed_bytes:
        count = os.preadv(file, [part[done_bytes:]], start + done_bytes)
        if not count:
            raise PackedFileError(
                f"the packed file ends at byte {start + done_bytes}: it was truncated while in use"
            )
        done_bytes += count
    if not is_direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, needed_bytes, os.POSIX_FADV_DONTNEED)
