"""CPU and memory limits of this process's control groups (cgroups), version 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of one control group, and its used memory without reclaimable file pages."""

    limit_bytes: int
    used_bytes: int


def cpu_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest CPU quota of all groups in processors, rounded up; None for no limit."""
    quotas = []
    for folder in _folders(root, "cpu"):
        fields = _text(folder / "cpu.max").split()
        if not fields:
            fields = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = fields
        if quota.isdecimal() and period.isdecimal() and int(quota):
            quotas.append(math.ceil(int(quota) / int(period)))
    return min(quotas, default=None)


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """List the memory limits of this process's group and of the groups above."""
    limits = []
    for folder in _folders(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        usage = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        # Version 1 expresses "no limit" as the largest multiple of the page size.
        if limit.isdecimal() and usage.isdecimal() and int(limit) < 1 << 60:
            used_bytes = max(int(usage) - _reclaimable_bytes(folder), 0)
            limits.append(MemoryLimit(int(limit), used_bytes))
    return limits


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and its ancestors, innermost first.

    Inside a container, the path may be a path of the host, where the container mounts nothing. The
    mounted root folder is then the container's group and the only folder yielded.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy with an empty list of controllers.
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
    """Read the bytes of inactive file pages, which the group gives up under memory pressure."""
    counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
