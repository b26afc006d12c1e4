"""Limits that a control group puts on this process, in version 2 and in version 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of one group, and what it uses that cannot be reclaimed."""

    limit_bytes: int
    used_bytes: int


def cpu_limit(root: Path = Path("/")) -> int | None:
    """Return the processors' worth of time that all groups allow, rounded up; None for no limit."""
    quotas = []
    for folder in _folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if not words:
            words = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = words
        if quota.isdecimal() and period.isdecimal() and int(quota):
            quotas.append(math.ceil(int(quota) / int(period)))
    return min(quotas, default=None)


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limit of every group around this process that has one."""
    limits = []
    for folder in _folders(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        # Version 1 says "no limit" with the largest multiple of the page size.
        if limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60:
            used_bytes = max(int(used) - _reclaimable_bytes(folder), 0)
            limits.append(MemoryLimit(int(limit), used_bytes))
    return limits


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and its ancestors, innermost first.

    Inside a container the path may be that of the host, which is not mounted; what is mounted
    then is the container's own group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and folder.is_dir():
                yield folder


def _reclaimable_bytes(folder: Path) -> int:
    """Return the bytes of file pages that the group gives up under pressure."""
    counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
