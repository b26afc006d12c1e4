"""What the operating system says about processors, caches, NUMA nodes and memory.

Where files are read, ``root`` is the folder in which ``proc`` and ``sys`` lie.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from interposer.capability import Memory
from interposer_cpu.cgroup import cpu_limit, memory_limits

__all__ = [
    "allowed_processors",
    "caches_bytes",
    "memory",
    "numa_nodes",
    "processor_name",
    "usable_cores",
]

_ROOT = Path("/")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def processor_name(root: Path = _ROOT) -> str:
    """Return the model of the first processor, or its architecture where none is named."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def allowed_processors() -> list[int]:
    """Return the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many processors' worth of time this process can use."""
    allowed = len(allowed_processors())
    return min(allowed, cpu_limit(root) or allowed)


def memory(root: Path = _ROOT) -> Memory:
    """Return total and free memory within the limits of control groups, 0 where unknown."""
    total, free = _host_memory(root)
    for group in memory_limits(root):
        total = min(total, group.limit_bytes)
        free = min(free, max(group.limit_bytes - group.used_bytes, 0))
    return Memory(total_bytes=total, free_bytes=min(free, total))


def caches_bytes(root: Path = _ROOT) -> dict[str, int]:
    """Return the sizes of the data caches that one processor sees, by level."""
    processor = allowed_processors()[0]
    sizes = {}
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{processor}/cache").glob("index*")):
        level, kind, size = ("".join(_lines(folder / name)) for name in ("level", "type", "size"))
        if level and kind in ("Data", "Unified") and size[-1:] in _UNITS:
            name = f"l{level}" + ("d" if kind == "Data" else "")
            sizes[name] = int(size[:-1]) * _UNITS[size[-1]]
    return sizes


def numa_nodes(root: Path = _ROOT) -> dict[int, Sequence[int]]:
    """Return the logical processors of every node that has any; one node where unknown."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        processors = _expanded("".join(_lines(folder / "cpulist")))
        if processors:
            nodes[int(folder.name.removeprefix("node"))] = processors
    return dict(sorted(nodes.items())) or {0: allowed_processors()}


def _host_memory(root: Path) -> tuple[int, int]:
    counts = {}
    for line in _lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        counts[key] = int(value.split()[0]) * 1024
    if "MemTotal" in counts:
        return counts["MemTotal"], counts.get("MemAvailable", counts.get("MemFree", 0))
    total = _pages_bytes("SC_PHYS_PAGES")
    return total, _pages_bytes("SC_AVPHYS_PAGES") or total


def _pages_bytes(name: str) -> int:
    """Return a count of pages in bytes, 0 where the system does not keep it."""
    if name not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _expanded(ranges: str) -> list[int]:
    """Return the numbers of a list such as ``"0-3,8"``."""
    numbers: list[int] = []
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
