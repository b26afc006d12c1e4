"""Weights of a packed file, read into buffers past the system's cache of the disk."""

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
_GAP_BYTES = 1 << 16  # reading on takes less time than beginning anew
# Two requests keep a disk busy while one of them is handed over.
_THREADS = 2


class Extents:
    """The parts of a file that hold some memories, and where these lie in a buffer."""

    def __init__(self, memories: dict[int, tuple[int, int]]) -> None:
        """Find the parts.

        Args:
            memories: first byte behind the header, and number of bytes, of each by its number.
        """
        self.parts: list[tuple[int, int, int]] = []  # begin and end in the file, begin in a buffer
        self.places: dict[int, int] = {}
        for number, (start, num_bytes) in sorted(memories.items(), key=lambda each: each[1]):
            start += HEADER_BYTES
            end = -(-(start + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
            if self.parts and start <= self.parts[-1][1] + _GAP_BYTES:
                begin, known, at = self.parts.pop()
                end = max(end, known)
            else:
                begin, at = start // _PAGE_BYTES * _PAGE_BYTES, self.num_bytes
            self.parts.append((begin, end, at))
            self.places[number] = at + start - begin

    @property
    def num_bytes(self) -> int:
        """The bytes of a buffer that holds all parts."""
        if not self.parts:
            return 0
        begin, end, at = self.parts[-1]
        return at + end - begin


class DiskReader(Filler):
    """Reads blocks of a file by threads into buffers that stay where they are.

    Memory that a mapping reads costs a fault per page and room in the system's cache, where it
    drives out what is resident. Where the file system reads no other way, that room is given back.

    Raises: PackedFileError: the file cannot be opened.
    """

    def __init__(self, path: Path, blocks: Sequence[Extents], num_buffers: int) -> None:
        self._blocks = blocks
        size = -(-max(extents.num_bytes for extents in blocks) // _PIECE_BYTES) * _PIECE_BYTES
        self._buffers = [_buffer(size) for _ in range(num_buffers)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        try:
            self._file, self.is_direct = _opened(path)
        except OSError as error:
            raise PackedFileError(f"{path} cannot be read: {error}") from error
        self._size = os.fstat(self._file).st_size
        self._threads = ThreadPoolExecutor(_THREADS, "interposer-offload")
        weakref.finalize(self, _end, self._threads, self._file)

    def memory(self, buffer: int, at: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer, uint8, of a storage of its own."""
        return torch.frombuffer(
            self._buffers[buffer], dtype=torch.uint8, count=num_bytes, offset=at
        )

    def fill(self, block: int, buffer: int) -> list[Future[None]]:
        """Let threads read a block."""
        view, read = self._views[buffer], []
        for begin, end, at in self._blocks[block].parts:
            for start in range(begin, end, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, end)
                place = at + start - begin
                part = view[place : place + stop - start]
                read.append(
                    self._threads.submit(_read, self._file, part, start, self._size, self.is_direct)
                )
        return read

    def wait(self, filling: Any) -> None:
        """Wait until a block is read."""
        for part in filling:
            part.result()

    def done(self, buffer: int) -> None:
        """Do nothing: a processor has computed when it returns."""


def _end(threads: ThreadPoolExecutor, file: int) -> None:
    threads.shutdown(cancel_futures=True)  # what reads has to end before the file may close
    os.close(file)


def _buffer(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _opened(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):  # a file system without
            return os.open(path, flags | direct), True
    return os.open(path, flags), False


def _read(file: int, part: memoryview, start: int, size: int, is_direct: bool) -> None:
    done, wanted = 0, min(len(part), size - start)
    while done < wanted:
        count = os.preadv(file, [part[done:]], start + done)
        if not count:
            raise PackedFileError(f"the packed file ends at {start + done}: somebody cut it off")
        done += count
    if not is_direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, wanted, os.POSIX_FADV_DONTNEED)
