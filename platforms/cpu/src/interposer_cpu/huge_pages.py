"""Memory in huge pages for what is read from its beginning to its end in every step.

With pages of 4 KiB, translating addresses takes longer than the memory that is read: streams of
weights and of keys gain up to a half. Linux gives huge pages to memory for which they are asked,
if ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise``. Where it says ``always``, any
large block has them, where it says ``never``, none has; both are the administrator's choice.

Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

import torch

from interposer import KVCacheLayout, Verdict

__all__ = ["HugePagesLayout", "allowed", "empty", "page_bytes"]

_ROOT = Path("/")
_FOLDER = "sys/kernel/mm/transparent_hugepage"
_KINDS = ("mmap", "MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new memory without content, in huge pages where the system gives them on request.

    Its last part, of less than a huge page, lies in small ones, so that no more memory is taken
    than the tensor needs. Memory of less than one huge page is torch's own.
    """
    count = prod(shape)
    num_bytes = count * dtype.itemsize
    huge_bytes = _requested_bytes()
    if huge_bytes and num_bytes >= huge_bytes:
        with suppress(OSError):  # the system limits maps: torch may find memory in its heap
            return _mapped(num_bytes, huge_bytes, dtype, count).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype)


def allowed(root: Path = _ROOT) -> Verdict:
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
    size = page_bytes(root)
    if not size:
        return Verdict.refuse(f"{path} says {setting!r}, but nothing says how large they are")
    unit = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    return Verdict.accept(f"of {unit}, for packed weights and caches ({path} says {setting!r})")


def page_bytes(root: Path = _ROOT) -> int:
    """Return the size of a huge page, 0 where unknown: 2 MiB on x86, 1 MiB on s390x."""
    size = _text(root / _FOLDER / "hpage_pmd_size")
    return int(size) if size.isdecimal() else 0


class HugePagesLayout(KVCacheLayout):
    """A cache that lies in huge pages where there are any."""

    def empty(self, shape: Sequence[int], device: str) -> torch.Tensor:
        """Return memory for one cache, or for those of all layers."""
        return empty(shape, self.dtype)


@cache
def _requested_bytes() -> int:
    """Return the size of the huge pages that are to be asked for, 0 where there are none."""
    if not all(hasattr(mmap, name) for name in _KINDS) or _setting(_ROOT) != "madvise":
        return 0
    return page_bytes()


def _mapped(num_bytes: int, huge_bytes: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    # What lies before the first border of a huge page is never touched, so it is no memory.
    memory = mmap.mmap(-1, num_bytes + huge_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    start = -address % huge_bytes
    with suppress(OSError):  # it is memory all the same
        memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // huge_bytes * huge_bytes)
    # The tensor keeps the mapping, which ends with it.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


def _setting(root: Path) -> str:
    """Return the word in brackets, which is the one in force; empty where there is none."""
    found = re.search(r"\[(\w+)\]", _text(root / _FOLDER / "enabled"))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
