"""Processors, caches, NUMA nodes and memory, as the operating system reports them.

Where files are read, ``root`` is the folder in which ``proc`` and ``sys`` lie.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from interposer import Memory
from interposer_cpu._cgroup import cpu_limit, memory_limits

_ROOT = Path("/")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# Numbers by which ARM's processors say who designed them, and which of the designer's they are.
# Source: Linux, arch/arm64/include/asm/cputype.h.
_ARM_DESIGNERS = {
    0x41: "ARM",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0xC0: "Ampere",
}
_ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "TSV110",
    (0xC0, 0xAC3): "AmpereOne",
}
# Numbers of s390x machines. Source: GCC, config/s390/driver-native.cc.
_Z_MACHINES = {
    "3906": "z14",
    "3907": "z14",
    "8561": "z15",
    "8562": "z15",
    "3931": "z16",
    "3932": "z16",
    "9175": "z17",
    "9176": "z17",
}


def processor_name(root: Path = _ROOT) -> str:
    """Return the model of the first processor, or its architecture where none is named."""
    facts: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    for key in ("model name", "cpu model", "Model"):
        if facts.get(key):
            return facts[key]
    named = _arm_name(facts) or _z_name(facts)
    return named or platform.processor() or platform.machine()


def _arm_name(facts: Mapping[str, str]) -> str:
    """Return the name of an ARM processor by its numbers, empty where there are none."""
    try:
        designer, part = int(facts["CPU implementer"], 16), int(facts["CPU part"], 16)
    except (KeyError, ValueError):
        return ""
    name = _ARM_DESIGNERS.get(designer, f"ARM designer {designer:#04x}")
    return f"{name} {_ARM_PARTS.get((designer, part), f'part {part:#05x}')}"


def _z_name(facts: Mapping[str, str]) -> str:
    """Return the machine of s390x, whose line of a processor ends in ``machine = 8561``."""
    number = re.search(r"machine = (\w+)", facts.get("processor 0", ""))
    if number is None:
        return ""
    return f"IBM {_Z_MACHINES.get(number[1], f'machine {number[1]}')}"


def allowed_processors() -> list[int]:
    """Return the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores(root: Path = _ROOT) -> list[list[int]]:
    """Return the logical processors that this process may run on, grouped by core, in order.

    What shares a core shares its arithmetic units. Where the system does not say it, each is a
    core of its own.
    """
    allowed = allowed_processors()
    found: dict[int, list[int]] = {}
    for processor in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        # The second name is the one before Linux 5.3.
        texts = ("".join(_lines(folder / n)) for n in ("core_cpus_list", "thread_siblings_list"))
        together = _expanded(next(filter(None, texts), ""))
        found.setdefault(min(together, default=processor), []).append(processor)
    return sorted(found.values())


def wsl(root: Path = _ROOT) -> int:
    """Return the version of the Windows Subsystem for Linux that this runs in, 0 for none.

    Version 1 has no Linux kernel and says ``4.4.0-19041-Microsoft``; the kernel of version 2 is
    built by Microsoft, as ``5.15.90.1-microsoft-standard-WSL2``.
    """
    text = "".join(_lines(root / "proc/sys/kernel/osrelease") or _lines(root / "proc/version"))
    if "microsoft" not in text.lower():
        return 0
    return 2 if "microsoft-standard" in text or "wsl2" in text.lower() else 1


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


def listed(numbers: Sequence[int]) -> str:
    """Return numbers in order as a list such as ``"0-3,8"``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


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
