"""Memory of the host for large tensors: in huge pages, and apart from the heap.

Weights and keys are read from beginning to end in every step. With pages of 4 KiB, translating
their addresses holds that up: huge pages gain up to a half. Linux gives them on request where
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``, and where it says
``never``, none; that is the administrator's choice.

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
_LEAST_MAPPED_BYTES = 1 << 18
_MOST_SPARE_BYTES = 16 << 20
_SHARED_MAP_BYTES = 32 << 20
_LINE_BYTES = 64

_Map = tuple[mmap.mmap, int]  # and the offset of what is used of it
_Take = Callable[[int, bool], Tensor | None]


def empty(shape: Sequence[int], dtype: torch.dtype, *, lasting: bool = False) -> Tensor:
    """Return new memory without content, in huge pages where the system gives them on request.

    From 256 KiB on, it lies outside the heap: there, what stays would keep what is freed around it,
    up to 320 MB while a model of 1.1 GB is loaded.

    Args:
        lasting: it is read in every step of a model, so all of it is to lie in huge pages, which it
            shares with other memory that lasts. Otherwise memory is mapped for the tensor alone,
            and the last part, of less than a huge page, lies in small pages.
    """
    count, take = prod(shape), _placing.get()
    if count and take and (taken := take(count * dtype.itemsize, lasting)) is not None:
        return taken.view(dtype).view(tuple(shape))
    if _CAN_MAP and count * dtype.itemsize >= _LEAST_MAPPED_BYTES:
        with suppress(OSError):  # the system limits maps: torch may find memory in its heap
            mapped = _shared if lasting and _can_share() else _mapped
            return mapped(count, dtype).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype)


def cache_memory(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return memory of ``device`` for a KV cache; on the host, lasting memory of ``empty``."""
    if torch.device(device).type == "cpu":
        return empty(shape, dtype, lasting=True)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@contextmanager
def reused(spare: Spare | None = None) -> Iterator[None]:
    """Return a block in which memory whose tensor went serves the next one of the same size.

    The layers of a model hold plain weights of the same few sizes one after another. New memory is
    cleared by the system and lies in no cache, which takes as long as copying a weight there. Up to
    16 MiB are kept, until the block ends. Other threads and later memory have no part in it.

    Args:
        spare: what was kept in an earlier block, and is kept for later ones.
    """
    kept = Spare(_MOST_SPARE_BYTES) if spare is None else spare
    token = _spare.set(kept)
    try:
        yield
    finally:
        _spare.reset(token)
        if spare is None:
            kept.close()


@contextmanager
def placed(take: Callable[[int, bool], Tensor | None]) -> Iterator[None]:
    """Return a block in which ``take`` gives memory: uint8, of so many bytes, aligned to 64.

    It is told whether the memory is to last, and returns None for what lies elsewhere.
    """
    token = _placing.set(take)
    try:
        yield
    finally:
        _placing.reset(token)


def require_pinned(tensor: Tensor) -> None:
    """Return if a device can be given an address of ``tensor``.

    Raises: ConfigError: it is no page-locked memory of the host.
    """
    if tensor.device.type != "cpu" or not tensor.is_pinned():
        raise ConfigError(
            f"only pinned host memory has an address on the device, this tensor is on "
            f"{tensor.device} and not pinned. Try: platform.pin_memory(tensor)"
        )


def trim() -> None:
    """Give freed memory of the heap back to the system, where the C library can be asked to.

    By itself glibc gives back what lies behind the last block in use only. Small tensors that stay
    between the temporaries of loading kept 80 MiB of a model of 520 MiB so. It takes milliseconds.

    Source: malloc_trim(3).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def huge_pages(root: Path = _ROOT) -> Verdict:
    """Say whether large memory lies in huge pages, and why or why not.

    Args:
        root: the folder in which ``sys`` lies.
    """
    setting = _setting(root)
    if not setting:
        return Verdict.refuse("this system has none that a program can ask for")
    path = f"/{_FOLDER}/enabled"
    if setting == "never":
        return Verdict.refuse(f"{path} says 'never'; 'madvise' lets weights and caches have them")
    size = huge_page_bytes(root)
    if not size:
        return Verdict.refuse(f"{path} says {setting!r}, but nothing says how large they are")
    unit = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    return Verdict.accept(f"of {unit}, for packed weights and caches ({path} says {setting!r})")


def huge_page_bytes(root: Path = _ROOT) -> int:
    """Return the size of a huge page, 0 where unknown; it differs between architectures."""
    size = _text(root / _FOLDER / "hpage_pmd_size")
    return int(size) if size.isdecimal() else 0


@cache
def _requested_bytes() -> int:
    """Return the size of the huge pages that are to be asked for, 0 where there are none."""
    can_ask = hasattr(mmap, "MADV_HUGEPAGE") and huge_pages().accepted
    return huge_page_bytes() if can_ask else 0


def _can_share() -> bool:
    # The last huge page of a map is memory once it was touched: ARM has some of 512 MiB.
    return 0 < _requested_bytes() <= _SHARED_MAP_BYTES


def _mapped(count: int, dtype: torch.dtype) -> Tensor:
    num_bytes, spare = count * dtype.itemsize, _spare.get()
    found = None if spare is None else spare._take(num_bytes)
    memory, start = found or _new_map(num_bytes)
    # The tensor keeps the object that it was made from, and that the mapping, which ends with it.
    kept = memoryview(memory)
    if spare is not None:
        weakref.finalize(kept, spare._put, num_bytes, (memory, start)).atexit = False
    return torch.frombuffer(kept, dtype=dtype, count=count, offset=start)


def _new_map(num_bytes: int) -> _Map:
    huge_bytes = _requested_bytes()
    advised_bytes = num_bytes // huge_bytes * huge_bytes if huge_bytes else 0
    # What lies before the first border of a huge page is never touched, so it is no memory.
    spare_bytes = huge_bytes if advised_bytes else 0
    memory = mmap.mmap(-1, num_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if advised_bytes:
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % huge_bytes
        with suppress(OSError):  # it is memory all the same
            memory.madvise(mmap.MADV_HUGEPAGE, start, advised_bytes)
    return memory, start


def _shared(count: int, dtype: torch.dtype) -> Tensor:
    num_bytes = count * dtype.itemsize
    memory, start = _shared_maps.take(num_bytes)
    kept = memoryview(memory)[start : start + num_bytes]
    weakref.finalize(kept, _forget, memory, start, num_bytes).atexit = False
    return torch.frombuffer(kept, dtype=dtype, count=count)


def _forget(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Give the whole pages of what went back, while neighbours keep the map."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)


class _SharedMaps:
    """Maps of huge pages that tensors share; each goes with the last of them.

    What no tensor has touched is no memory, so a map costs a part of one huge page at most.
    """

    def __init__(self) -> None:
        self._open: list[tuple[weakref.ref[mmap.mmap], int, int]] = []  # its rest: start and end
        self._lock = Lock()

    def take(self, num_bytes: int) -> _Map:
        with self._lock:
            taken: _Map | None = None
            still_open = []
            for alive, start, end in self._open:
                memory = alive()
                if memory is None:
                    continue
                if taken is None and num_bytes <= end - start:
                    taken = memory, start
                    start += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
                if end - start >= _LEAST_MAPPED_BYTES:
                    still_open.append((alive, start, end))
            self._open = still_open
            return taken or self._begin(num_bytes)

    def _begin(self, num_bytes: int) -> _Map:
        huge_bytes = _requested_bytes()
        whole_bytes = -(-max(num_bytes, _SHARED_MAP_BYTES) // huge_bytes) * huge_bytes
        memory, start = _new_map(whole_bytes)
        rest = start + -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        self._open.append((weakref.ref(memory), rest, start + whole_bytes))
        return memory, start


_shared_maps = _SharedMaps()


class Spare:
    """Maps without a tensor, by the bytes that were asked for, until it is closed."""

    def __init__(self, most_bytes: int) -> None:
        """Have none; so many bytes are kept at most."""
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
        """Keep nothing, now and later."""
        self._free_bytes = 0
        self._maps.clear()


_placing: ContextVar[_Take | None] = ContextVar("place of host memory", default=None)
_spare: ContextVar[Spare | None] = ContextVar("spare maps of host memory", default=None)


def _setting(root: Path) -> str:
    """Return the word in brackets, which is the one in force; empty where there is none."""
    found = re.search(r"\[(\w+)\]", _text(root / _FOLDER / "enabled"))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
