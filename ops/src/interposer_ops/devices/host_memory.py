"""Host memory for large tensors: in huge pages and outside the heap.

Weights and keys are read from beginning to end in every step. With 4 KiB pages, address translation
slows these reads down; huge pages are up to 50 % faster. Linux provides huge pages on request if
``/sys/kernel/mm/transparent_hugepage/enabled`` is ``madvise`` or ``always``; ``never`` is the
administrator's choice.

Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from math import prod
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from interposer import Verdict
from interposer.errors import ConfigError
from interposer_ops.devices.system_files import read_text

__all__ = [
    "Spare",
    "cache_memory",
    "empty",
    "huge_page_bytes",
    "huge_pages",
    "placed",
    "require_pinned",
    "reused",
    "trim",
]

_ROOT = Path("/")
_FOLDER = "sys/kernel/mm/transparent_hugepage"
_CAN_MAP = all(hasattr(mmap, name) for name in ("MAP_ANONYMOUS", "MAP_PRIVATE"))
_MIN_MAPPED_BYTES = 1 << 18
_MAX_SPARE_BYTES = 16 << 20
_SHARED_MAP_BYTES = 32 << 20
_LINE_BYTES = 64

_Map = tuple[mmap.mmap, int]  # a mapping and the offset of its used part
_Take = Callable[[int, bool], Tensor | None]


def empty(shape: Sequence[int], dtype: torch.dtype, *, lasting: bool = False) -> Tensor:
    """Allocate uninitialised memory, in huge pages if the system provides them on request.

    Memory of 256 KiB or more lies outside the heap. Inside the heap, long-lived tensors would keep
    the C library from returning the freed memory between them: up to 320 MB while a model of 1.1 GB
    is loaded.

    Args:
        lasting: the memory is read in every step of a model, so all of it should lie in huge pages.
            Lasting tensors share huge pages. Any other tensor gets a separate mapping, and the last
            part of the mapping, smaller than a huge page, lies in small pages.
    """
    count, take = prod(shape), _placing.get()
    if count and take and (memory := take(count * dtype.itemsize, lasting)) is not None:
        return memory.view(dtype).view(tuple(shape))
    if _CAN_MAP and count * dtype.itemsize >= _MIN_MAPPED_BYTES:
        # The system limits the number of mappings; torch may still find memory in the heap.
        with suppress(OSError):
            allocate = _shared if lasting and _can_share() else _mapped
            return allocate(count, dtype).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype)


def cache_memory(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Allocate a KV cache on ``device``; on the CPU by ``empty``, which can use huge pages."""
    if torch.device(device).type == "cpu":
        return empty(shape, dtype, lasting=True)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@contextmanager
def reused(spare: Spare | None = None) -> Iterator[None]:
    """Reuse the memory of freed tensors for new tensors of the same size, in a ``with`` block.

    Loading creates many short-lived weights of a few sizes. The system clears new memory, and new
    memory is in no cache: together this takes as long as copying a weight. Up to 16 MiB are kept
    until the block ends. Other threads are not affected.

    Args:
        spare: memory kept from an earlier block, and kept for later blocks.
    """
    free_maps = Spare(_MAX_SPARE_BYTES) if spare is None else spare
    token = _spare.set(free_maps)
    try:
        yield
    finally:
        _spare.reset(token)
        if spare is None:
            free_maps.close()


@contextmanager
def placed(take: Callable[[int, bool], Tensor | None]) -> Iterator[None]:
    """Replace the allocator of ``empty`` by ``take``, in a ``with`` block.

    ``take`` receives the number of bytes and whether the memory is lasting. It returns a uint8
    tensor aligned to 64 bytes, or None to leave the allocation to ``empty``.
    """
    token = _placing.set(take)
    try:
        yield
    finally:
        _placing.reset(token)


def require_pinned(tensor: Tensor) -> None:
    """Check that a device can address ``tensor``.

    Raises: ConfigError: the tensor is not page-locked host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_pinned():
        raise ConfigError(
            f"only pinned host memory has an address on the device, this tensor is on "
            f"{tensor.device} and not pinned. Try: platform.pin_memory(tensor)"
        )


def trim() -> None:
    """Return freed heap memory to the system, if the C library supports it.

    By itself glibc returns only memory after the last block in use. Small long-lived tensors
    between the temporaries of loading kept 80 MiB of a model of 520 MiB. Takes milliseconds.

    Source: malloc_trim(3).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def huge_pages(root: Path = _ROOT) -> Verdict:
    """Return whether large tensors lie in huge pages, and the reason.

    Args:
        root: the folder that contains ``sys``.
    """
    setting = _setting(root)
    if not setting:
        return Verdict.refuse("this system offers no huge pages on request")
    path = f"/{_FOLDER}/enabled"
    if setting == "never":
        return Verdict.refuse(f"{path} says 'never'; set 'madvise' to allow huge pages on request")
    size = huge_page_bytes(root)
    if not size:
        return Verdict.refuse(f"{path} says {setting!r}, but the size of huge pages is unknown")
    unit = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    return Verdict.accept(f"of {unit}, for packed weights and caches ({path} says {setting!r})")


def huge_page_bytes(root: Path = _ROOT) -> int:
    """Return the architecture-dependent size of a huge page in bytes, 0 if unknown."""
    size = read_text(root / _FOLDER / "hpage_pmd_size").strip()
    return int(size) if size.isdecimal() else 0


@cache
def _requested_bytes() -> int:
    """Return the size of huge pages to request with madvise, 0 if there are none."""
    can_ask = hasattr(mmap, "MADV_HUGEPAGE") and huge_pages().accepted
    return huge_page_bytes() if can_ask else 0


def _can_share() -> bool:
    # Touching a map's last huge page allocates all of it, and ARM has huge pages of 512 MiB.
    return 0 < _requested_bytes() <= _SHARED_MAP_BYTES


def _mapped(count: int, dtype: torch.dtype) -> Tensor:
    num_bytes, spare = count * dtype.itemsize, _spare.get()
    recycled = None if spare is None else spare._take(num_bytes)
    memory, start = recycled or _new_map(num_bytes)
    # The tensor keeps the view alive, the view keeps the mapping; no tensor, no mapping.
    view = memoryview(memory)
    if spare is not None:
        weakref.finalize(view, spare._put, num_bytes, (memory, start)).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start)


def _new_map(num_bytes: int) -> _Map:
    huge_bytes = _requested_bytes()
    advised_bytes = num_bytes // huge_bytes * huge_bytes if huge_bytes else 0
    # Extra space, to start at a huge page boundary. Memory before the boundary is never touched,
    # so the system never allocates it.
    alignment_bytes = huge_bytes if advised_bytes else 0
    memory = mmap.mmap(-1, num_bytes + alignment_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if advised_bytes:
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % huge_bytes
        with suppress(OSError):  # without huge pages the memory works, too
            memory.madvise(mmap.MADV_HUGEPAGE, start, advised_bytes)
    return memory, start


def _shared(count: int, dtype: torch.dtype) -> Tensor:
    num_bytes = count * dtype.itemsize
    memory, start = _shared_maps.take(num_bytes)
    view = memoryview(memory)[start : start + num_bytes]
    weakref.finalize(view, _release_pages, memory, start, num_bytes).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count)


def _release_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Return the pages of a freed tensor to the system, while neighbours keep the mapping."""
    # Pages at either end may be shared with neighbours, so only pages wholly inside are returned.
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)


class _SharedMaps:
    """Mappings of huge pages shared by tensors; a mapping ends with its last tensor.

    Untouched pages are not allocated, so a mapping wastes less than one huge page.
    """

    def __init__(self) -> None:
        # Mappings with free space: the mapping, start and end of the space.
        self._open: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
        self._lock = Lock()

    def take(self, num_bytes: int) -> _Map:
        with self._lock:
            allocation: _Map | None = None
            still_open = []
            for reference, start, end in self._open:
                memory = reference()
                if memory is None:
                    continue
                if allocation is None and num_bytes <= end - start:
                    allocation = memory, start
                    start += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
                if end - start >= _MIN_MAPPED_BYTES:
                    still_open.append((reference, start, end))
            self._open = still_open
            return allocation or self._open_map(num_bytes)

    def _open_map(self, num_bytes: int) -> _Map:
        huge_bytes = _requested_bytes()
        map_bytes = -(-max(num_bytes, _SHARED_MAP_BYTES) // huge_bytes) * huge_bytes
        memory, start = _new_map(map_bytes)
        # Aligned to cache lines, so that two tensors never share a line.
        free_start = start + -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        self._open.append((weakref.ref(memory), free_start, start + map_bytes))
        return memory, start


_shared_maps = _SharedMaps()


class Spare:
    """Cache of unused mappings by size, for ``reused``."""

    def __init__(self, most_bytes: int) -> None:
        """Create an empty cache that keeps at most ``most_bytes``."""
        self._maps: defaultdict[int, list[_Map]] = defaultdict(list)
        self._free_bytes = most_bytes

    def _take(self, num_bytes: int) -> _Map | None:
        maps = self._maps.get(num_bytes)
        if not maps:
            return None
        self._free_bytes += num_bytes
        return maps.pop()

    def _put(self, num_bytes: int, map: _Map) -> None:
        if num_bytes <= self._free_bytes:
            self._free_bytes -= num_bytes
            self._maps[num_bytes].append(map)

    def close(self) -> None:
        """Drop all mappings, and keep none from now on."""
        self._free_bytes = 0
        self._maps.clear()


_placing: ContextVar[_Take | None] = ContextVar("place of host memory", default=None)
_spare: ContextVar[Spare | None] = ContextVar("spare maps of host memory", default=None)


def _setting(root: Path) -> str:
    """Return the system's active huge-page setting (the word in brackets), or "" if unknown."""
    match = re.search(r"\[(\w+)\]", read_text(root / _FOLDER / "enabled"))
    return match[1] if match else ""
