"""The writing of packed weights: kernels pack into the pages of the file itself."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import torch

from interposer.tooling import open_owned, warn_if_shared
from interposer_models._packed.packed_file import (
    HEADER_BYTES,
    BeingWrittenError,
    Facts,
    MappedMemory,
    PackedFileError,
    write_header,
)

_SEGMENT_BYTES = 32 << 20
_HUGE_BYTES = 2 << 20
_LINE_BYTES = 64


class PackedWriter:
    """A new file beside its final name, which one process at a time writes.

    Nothing of it is read before it has that name, so that what a process leaves that ends is
    overwritten by the next.

    Args:
        secret: signs the header; None writes no signature.
    Raises: PackedFileError: it cannot be made; BeingWrittenError where another process makes it.
    """

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        self.path = path
        self._secret = secret
        self._part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_owned(self._part, writes=True)
        except OSError as error:
            raise PackedFileError(f"{path.parent} cannot be written: {error}") from error
        warn_if_shared(path.parent)
        try:
            _lock(self._file, self._part)
            os.ftruncate(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise
        self.memories: list[tuple[int, int]] = []
        self._end = 0
        self._memory: MappedMemory | None = None
        self._segment: mmap.mmap | None = None
        self._segment_start = self._segment_end = 0
        self._given: list[tuple[weakref.ref[mmap.mmap], int, int, int]] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return so many bytes of the file, uint8, to be written.

        Raises: PackedFileError: the disk is full.
        """
        if self._segment is None or self._end + num_bytes > self._segment_end:
            self._begin(num_bytes)
        assert self._segment is not None
        at = self._end - self._segment_start
        taken = torch.frombuffer(self._segment, dtype=torch.uint8, count=num_bytes, offset=at)
        self._end += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return taken

    def place(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        """Return memory for what is packed, or for what is large and goes when it was packed.

        Codes of a whole vocabulary would be the most of all anonymous memory, which a system
        without swap cannot take back. They lie in a file without a name.

        Raises: PackedFileError: the disk is full.
        """
        if lasting:
            return self.take(num_bytes)
        if num_bytes < _SEGMENT_BYTES:
            return None
        size = -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES
        try:
            with TemporaryFile(dir=self.path.parent) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise PackedFileError(f"{self.path.parent} cannot be written: {error}") from error
        _ask_for_huge_pages(memory)
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)

    def keep(self, memory: torch.Tensor) -> int:
        """Return the number of a memory, uint8, which is copied unless it is the file's already.

        Raises: PackedFileError: the disk is full.
        """
        num_bytes = memory.nbytes
        start = self._place(memory.data_ptr()) if num_bytes else 0
        if start is None:
            start = -(-self._end // _LINE_BYTES) * _LINE_BYTES
            copy = self.take(num_bytes)
            start = self._place(copy.data_ptr())
            copy.copy_(memory)
        assert start is not None
        self.memories.append((start, num_bytes))
        return len(self.memories) - 1

    def memory(self) -> MappedMemory:
        """Return what was kept, mapped once, and end writing."""
        if self._memory is None:
            self._segment = None
            os.ftruncate(self._file, HEADER_BYTES + self._end)
            self._memory = MappedMemory(self._file, self.memories)
        return self._memory

    def publish(self, facts: Facts) -> None:
        """Give the file its name, with checksums, when it is safe on the disk.

        Raises: PackedFileError: it cannot be written.
        """
        try:
            facts.digests[:] = self.memory().digests()
            write_header(self._file, facts, self._end, self._secret)
            os.fsync(self._file)
            self._part.replace(self.path)
        except OSError as error:
            raise PackedFileError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Let others write the file; what has no name yet goes."""
        if self._file >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._file), self._part.lstat()):
                    self._part.unlink()
            os.close(self._file)
            self._file = -1

    def _begin(self, num_bytes: int) -> None:
        # The huge page that the last segment ended in is mapped again: what follows lies close.
        start = self._end // _HUGE_BYTES * _HUGE_BYTES
        needed = self._end - start + num_bytes
        size = -(-max(needed, _SEGMENT_BYTES) // _HUGE_BYTES) * _HUGE_BYTES
        self._segment = None
        try:
            # A page that finds no room on the disk ends the process.
            os.posix_fallocate(self._file, HEADER_BYTES + start, size)
            self._segment = mmap.mmap(self._file, size, offset=HEADER_BYTES + start)
        except OSError as error:
            raise PackedFileError(f"{self._part} cannot be written: {error}") from error
        _ask_for_huge_pages(self._segment)
        address = torch.frombuffer(self._segment, dtype=torch.uint8).data_ptr()
        alive = [given for given in self._given if given[0]() is not None]
        self._given = [*alive, (weakref.ref(self._segment), address, address + size, start)]
        self._segment_start, self._segment_end = start, start + size

    def _place(self, address: int) -> int | None:
        for alive, begin, end, start in self._given:
            if begin <= address < end and alive() is not None:
                return start + address - begin
        return None


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        raise PackedFileError("this system locks no files") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.fstat(file), path.lstat())
    except OSError as error:
        raise BeingWrittenError(f"another process writes {path}") from error
    if not ours:  # it was renamed meanwhile
        raise BeingWrittenError(f"another process has just written {path}")
