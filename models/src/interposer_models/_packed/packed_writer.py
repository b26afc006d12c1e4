"""Writes packed weights: kernels pack directly into mapped pages of the file."""

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
_ALIGNED_BYTES = 64


class PackedWriter:
    """A new file next to the final path; only one process can write at a time.

    The file is written under a temporary name, which nothing reads, so that the next writer can
    overwrite the remains of a process that ended.

    Args:
        secret: signs the header; None writes no signature.
    Raises: PackedFileError: the file cannot be created; BeingWrittenError: another process is
        writing it.
    """

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        self.path = path
        self._secret = secret
        self._part_path = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_owned(self._part_path, writes=True)
        except OSError as error:
            raise PackedFileError(f"{path.parent} cannot be written: {error}") from error
        warn_if_shared(path.parent)
        try:
            _lock(self._file, self._part_path)
            os.ftruncate(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise
        self.memories: list[tuple[int, int]] = []
        self._end = 0
        self._memory: MappedMemory | None = None
        self._segment: mmap.mmap | None = None
        self._segment_start = self._segment_end = 0
        # Mapped segments as (map, first address, end address, offset in the data).
        self._segments: list[tuple[weakref.ref[mmap.mmap], int, int, int]] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next ``num_bytes`` of the file as uint8, to be written.

        Raises: PackedFileError: the disk is full.
        """
        if self._segment is None or self._end + num_bytes > self._segment_end:
            self._start_segment(num_bytes)
        assert self._segment is not None
        offset = self._end - self._segment_start
        memory = torch.frombuffer(self._segment, dtype=torch.uint8, count=num_bytes, offset=offset)
        self._end += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return memory

    def place(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        """Return memory for a packed tensor, or for a large temporary tensor that packing needs.

        Temporary tensors of a large vocabulary would be most of the anonymous memory, which a
        system without swap cannot reclaim. Such tensors lie in an unnamed file instead.

        Args:
            lasting: the memory is for a packed tensor.
        Returns: None if the caller must allocate the memory.
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
        """Return the number of a memory, uint8; copy memory that is not in the file yet.

        Raises: PackedFileError: the disk is full.
        """
        num_bytes = memory.nbytes
        start = self._offset_of(memory.data_ptr()) if num_bytes else 0
        if start is None:
            start = -(-self._end // _ALIGNED_BYTES) * _ALIGNED_BYTES
            copy = self.take(num_bytes)
            start = self._offset_of(copy.data_ptr())
            copy.copy_(memory)
        assert start is not None
        self.memories.append((start, num_bytes))
        return len(self.memories) - 1

    def memory(self) -> MappedMemory:
        """Map all memories that were kept, and end writing."""
        if self._memory is None:
            self._segment = None
            os.ftruncate(self._file, HEADER_BYTES + self._end)
            self._memory = MappedMemory(self._file, self.memories)
        return self._memory

    def publish(self, facts: Facts) -> None:
        """Write checksums and header, sync the file to the disk, and rename the file.

        Raises: PackedFileError: the file cannot be written.
        """
        try:
            facts.digests[:] = self.memory().digests()
            write_header(self._file, facts, self._end, self._secret)
            # Data must reach the disk before the name: a crash must not publish a corrupt file.
            os.fsync(self._file)
            self._part_path.replace(self.path)
        except OSError as error:
            raise PackedFileError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the file for other writers; remove an unpublished file."""
        if self._file >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._file), self._part_path.lstat()):
                    self._part_path.unlink()
            os.close(self._file)
            self._file = -1

    def _start_segment(self, num_bytes: int) -> None:
        # Map the last huge page again, so that the next memory follows without a gap.
        start = self._end // _HUGE_BYTES * _HUGE_BYTES
        needed = self._end - start + num_bytes
        size = -(-max(needed, _SEGMENT_BYTES) // _HUGE_BYTES) * _HUGE_BYTES
        self._segment = None
        try:
            # Reserve disk space: writing to a mapped page on a full disk would kill the process.
            os.posix_fallocate(self._file, HEADER_BYTES + start, size)
            self._segment = mmap.mmap(self._file, size, offset=HEADER_BYTES + start)
        except OSError as error:
            raise PackedFileError(f"{self._part_path} cannot be written: {error}") from error
        _ask_for_huge_pages(self._segment)
        address = torch.frombuffer(self._segment, dtype=torch.uint8).data_ptr()
        # A segment is unmapped when the last tensor in it is gone; addresses are reused then.
        mapped = [segment for segment in self._segments if segment[0]() is not None]
        self._segments = [*mapped, (weakref.ref(self._segment), address, address + size, start)]
        self._segment_start, self._segment_end = start, start + size

    def _offset_of(self, address: int) -> int | None:
        for segment, begin, end, start in self._segments:
            if begin <= address < end and segment() is not None:
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
        is_same_file = os.path.samestat(os.fstat(file), path.lstat())
    except OSError as error:
        raise BeingWrittenError(f"another process writes {path}") from error
    if not is_same_file:  # published meanwhile, so that the path has another name
        raise BeingWrittenError(f"another process has just written {path}")
