"""Memory of the host for large tensors: in huge pages, and apart from the heap.

Weights and keys are read from beginning to end in every step. With pages of 4 KiB, translating
their addresses holds that up: huge pages gain up to a half. Linux gives them on request where
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise``. Where it says ``always``, any
large block has them, where it says ``never``, none has; both are the administrator's choice.

Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from math import prod
from pathlib import Path

import torch

from interposer.errors import ConfigError
from interposer.verdict import Verdict

__all__ = ["empty", "huge_page_bytes", "huge_pages", "require_pinned", "reused", "trim"]

_ROOT = Path("/")
_FOLDER = "sys/kernel/mm/transparent_hugepage"
_CAN_MAP = all(hasattr(mmap, name) for name in ("MAP_ANONYMOUS", "MAP_PRIVATE"))
_LEAST_MAPPED_BYTES = 1 << 18
_MOST_SPARE_BYTES = 64 << 20

_Map = tuple[mmap.mmap, int]  # and the offset of what is used of it


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new memory without content, in huge pages where the system gives them on request.

    Its last part, of less than a huge page, lies in small ones, so that no more memory is taken
    than the tensor needs. From 256 KiB on, memory is mapped for the tensor alone: in the heap, what
    stays would keep what is freed around it, up to 320 MB while a model of 1.1 GB is loaded.
    """
    count = prod(shape)
    if _CAN_MAP and count * dtype.itemsize >= _LEAST_MAPPED_BYTES:
        with suppress(OSError):  # the system limits maps: torch may find memory in its heap
            return _mapped(count, dtype).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype)


@contextmanager
def reused() -> Iterator[None]:
    """Return a block in which memory whose tensor went serves the next one of the same size.

    The layers of a model hold plain weights of the same few sizes one after another. New memory is
    cleared by the system and lies in no cache, which takes as long as copying a weight there. Up to
    64 MiB are kept, until the block ends. Other threads and later memory have no part in it.
    """
    spare = _Spare()
    token = _spare.set(spare)
    try:
        yield
    finally:
        _spare.reset(token)
        spare.close()


def require_pinned(tensor: torch.Tensor) -> None:
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
    asked_for = hasattr(mmap, "MADV_HUGEPAGE") and _setting(_ROOT) == "madvise"
    return huge_page_bytes() if asked_for else 0


def _mapped(count: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes, spare = count * dtype.itemsize, _spare.get()
    found = None if spare is None else spare.take(num_bytes)
    memory, start = found or _new_map(num_bytes)
    # The tensor keeps the object that it was made from, and that the mapping, which ends with it.
    kept = memoryview(memory)
    if spare is not None:
        weakref.finalize(kept, spare.put, num_bytes, (memory, start)).atexit = False
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


class _Spare:
    """Maps without a tensor, by the bytes that were asked for."""

    def __init__(self) -> None:
        self._maps: defaultdict[int, list[_Map]] = defaultdict(list)
        self._free_bytes = _MOST_SPARE_BYTES

    def take(self, num_bytes: int) -> _Map | None:
        maps = self._maps.get(num_bytes)
        if not maps:
            return None
        self._free_bytes += num_bytes
        return maps.pop()

    def put(self, num_bytes: int, map: _Map) -> None:
        if num_bytes <= self._free_bytes:
            self._free_bytes -= num_bytes
            self._maps[num_bytes].append(map)

    def close(self) -> None:
        self._free_bytes = 0
        self._maps.clear()


_spare: ContextVar[_Spare | None] = ContextVar("spare maps of host memory", default=None)


def _setting(root: Path) -> str:
    """Return the word in brackets, which is the one in force; empty where there is none."""
    found = re.search(r"\[(\w+)\]", _text(root / _FOLDER / "enabled"))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
