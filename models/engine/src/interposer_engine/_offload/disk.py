"""Reads offloaded weights from a packed file, bypassing the system's page cache.

``DiskReader`` reads streamed blocks into buffers, which a ``Ring`` assigns to blocks.
``ExpertReads`` reads mapped experts that tokens are routed to, and no others: a page fault would
let the system also read the neighbouring pages, up to ``read_ahead_kb`` of the disk, while an
advice reads only its range. Other data that kernels need, such as sizes in front of each matrix, is
read page by page.

Dimensions: T tokens, K chosen experts.
"""

from __future__ import annotations

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interposer_engine._packed.file import HEADER_BYTES, MappedMemory, PackedFileError


class Filler(ABC):
    """Interface that fills buffers with the weights of streamed decoder blocks."""

    @abstractmethod
    def fill(self, block: int, buffer: int) -> Any:
        """Start to fill a buffer after its last use, and return the handle for ``wait``."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Let subsequent computation wait until the buffer is filled."""

    @abstractmethod
    def done(self, buffer: int) -> None:
        """Record that all work queued so far was the last to use the buffer's content."""


class Ring:
    """Assigns each streamed block one of several buffers at fixed addresses, in turn.

    When a block has been computed, its buffer is filled for the next block that uses it, which may
    belong to the next step. A block that is computed out of order waits for the weights.
    """

    def __init__(self, filler: Filler, num_blocks: int, num_buffers: int) -> None:
        self.filler = filler
        self._num_blocks, self._num_buffers = num_blocks, num_buffers
        self._block_of: list[int] = list(range(num_buffers))
        # Start at once with the first blocks of the first step.
        self._handles = [filler.fill(block, block) for block in range(num_buffers)]

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Register hooks that wait for each block's weights, and release the buffer afterwards."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter_hook(number))
            block.register_forward_hook(self._leave_hook(number))

    def enter(self, block: int) -> None:
        """Wait until the weights of a block are in its buffer."""
        buffer = block % self._num_buffers
        if self._block_of[buffer] != block:  # computed out of order
            self.filler.wait(self._handles[buffer])
            self.filler.done(buffer)
            self._fill(block, buffer)
        self.filler.wait(self._handles[buffer])

    def leave(self, block: int) -> None:
        """Start to fill the buffer of a finished block with the next block that uses the buffer."""
        buffer = block % self._num_buffers
        following = block + self._num_buffers
        if following >= self._num_blocks:
            following = buffer  # the first block of the next step
        if following != block:
            self.filler.done(buffer)
            self._fill(following, buffer)

    def _fill(self, block: int, buffer: int) -> None:
        self._block_of[buffer] = -1  # valid if filling fails
        self._handles[buffer] = self.filler.fill(block, buffer)
        self._block_of[buffer] = block

    def _enter_hook(self, number: int) -> Any:
        def enter(*_: object) -> None:
            self.enter(number)

        return enter

    def _leave_hook(self, number: int) -> Any:
        def leave(*_: object) -> None:
            self.leave(number)

        return leave


_SLACK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """A tensor storage (memory) in a packed file that holds weights of an MoE layer's experts.

    Attributes:
        number: number of the memory in the packed file.
        expert: the expert that uses all of the memory; None if all experts have equal parts, in
            order, after a header of at most 4 KiB.
    """

    number: int
    num_bytes: int
    expert: int | None


class ExpertReads:
    """Starts to read the chosen experts of one MoE layer from disk before the layer computes."""

    def __init__(
        self, mapped: MappedMemory, memories: Iterable[ExpertMemory], num_experts: int
    ) -> None:
        """Disable read-ahead for the tensor storages of the layer's experts.

        Args:
            memories: all memories of the layer.
        """
        self._mapped, self._num_experts = mapped, num_experts
        self._numbers_by_expert: dict[int, list[int]] = {}
        self._shared: list[ExpertMemory] = []
        layer_memories = [*memories]
        for memory in layer_memories:
            if memory.expert is None:
                self._shared.append(memory)
            else:
                self._numbers_by_expert.setdefault(memory.expert, []).append(memory.number)
        mapped.scatter(memory.number for memory in layer_memories)

    def attach(self, experts: nn.Module) -> None:
        """Register a hook that starts reading when ``experts`` gets ``(x, weights, expert_ids)``.

        Expert ids have the shape ``[T, K]``.
        """

        def read_chosen(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.read(arguments[2].unique().tolist())

        experts.register_forward_pre_hook(read_chosen)

    def read(self, expert_ids: Iterable[int]) -> None:
        """Let the operating system start to read experts; ids must ascend."""
        # Neighbouring experts of a shared memory need one advice.
        runs: list[list[int]] = []
        for expert in expert_ids:
            for number in self._numbers_by_expert.get(expert, ()):
                self._mapped.advise(number)
            if runs and runs[-1][1] == expert:
                runs[-1][1] += 1
            elif 0 <= expert < self._num_experts:  # other ids are padding
                runs.append([expert, expert + 1])
        for memory in self._shared:
            self._mapped.advise(memory.number, 0, _SLACK_BYTES)
            for first, last in runs:
                start = first * memory.num_bytes // self._num_experts - _SLACK_BYTES
                stop = -(-last * memory.num_bytes // self._num_experts) + _SLACK_BYTES
                self._mapped.advise(memory.number, start, stop)


_PAGE_BYTES = 4096
_PIECE_BYTES = 4 << 20
_GAP_BYTES = 1 << 16  # reading across such a gap is faster than a request of its own
# Two requests keep a disk busy while one of them completes.
_NUM_THREADS = 2


class Extents:
    """File ranges that contain the given tensor storages, and each storage's offset in a buffer."""

    def __init__(self, memories: dict[int, tuple[int, int]]) -> None:
        """Round the ranges to whole pages, and merge ranges that are close to each other.

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
        """Size of a buffer for all file ranges, in bytes."""
        if not self.parts:
            return 0
        begin, end, offset = self.parts[-1]
        return offset + end - begin


class DiskReader(Filler):
    """Reads decoder blocks from a file into buffers at fixed addresses, by threads.

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
            self._file, self.is_direct = _open_for_reading(path)
        except OSError as error:
            raise PackedFileError(f"{path} cannot be read: {error}") from error
        self._size = os.fstat(self._file).st_size
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "interposer-offload")
        weakref.finalize(self, _end, self._threads, self._file)

    def memory(self, buffer: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer as a uint8 tensor with its own storage."""
        return torch.frombuffer(
            self._buffers[buffer], dtype=torch.uint8, count=num_bytes, offset=offset
        )

    def fill(self, block: int, buffer: int) -> list[Future[None]]:
        """Start to read a block by threads."""
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


def _open_for_reading(path: Path) -> tuple[int, bool]:
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
