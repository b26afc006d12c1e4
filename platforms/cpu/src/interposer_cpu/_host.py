"""Processors, caches, NUMA nodes and memory, as the operating system reports them.

``root`` is the folder that contains ``proc`` and ``sys``; tests pass a folder with copies.
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


# Implementer and part numbers of ARM processors.
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
    """Name the model of the first processor, or the architecture if no model is reported."""
    facts: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    for key in ("model name", "cpu model", "Model"):
        if facts.get(key):
            return facts[key]
    name = _arm_name(facts) or _z_name(facts)
    return name or platform.processor() or platform.machine()


def _arm_name(facts: Mapping[str, str]) -> str:
    """Name an ARM processor by implementer and part numbers; "" without such numbers."""
    try:
        designer, part = int(facts["CPU implementer"], 16), int(facts["CPU part"], 16)
    except (KeyError, ValueError):
        return ""
    name = _ARM_DESIGNERS.get(designer, f"ARM designer {designer:#04x}")
    return f"{name} {_ARM_PARTS.get((designer, part), f'part {part:#05x}')}"


def _z_name(facts: Mapping[str, str]) -> str:
    """Name an s390x machine by its number, from a line that ends in ``machine = 8561``."""
    number = re.search(r"machine = (\w+)", facts.get("processor 0", ""))
    if number is None:
        return ""
    return f"IBM {_Z_MACHINES.get(number[1], f'machine {number[1]}')}"


def allowed_processors() -> list[int]:
    """List the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores(root: Path = _ROOT) -> list[list[int]]:
    """List the logical processors that this process may run on, grouped by core, in order.

    Processors of one core share its arithmetic units. Without information about cores, every
    processor counts as a core.
    """
    allowed = allowed_processors()
    processors_by_core: dict[int, list[int]] = {}
    for processor in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        # Before Linux 5.3, core_cpus_list was called thread_siblings_list.
        texts = ("".join(_lines(folder / n)) for n in ("core_cpus_list", "thread_siblings_list"))
        siblings = _expand_ranges(next(filter(None, texts), ""))
        core = min(siblings, default=processor)
        processors_by_core.setdefault(core, []).append(processor)
    return sorted(processors_by_core.values())


def wsl(root: Path = _ROOT) -> int:
    """Detect the version of the Windows Subsystem for Linux (WSL) around this process; 0 for none.

    WSL 1 has no Linux kernel and reports ``4.4.0-19041-Microsoft``. WSL 2 runs a kernel built by
    Microsoft, which reports ``5.15.90.1-microsoft-standard-WSL2``.
    """
    text = "".join(_lines(root / "proc/sys/kernel/osrelease") or _lines(root / "proc/version"))
    if "microsoft" not in text.lower():
        return 0
    return 2 if "microsoft-standard" in text or "wsl2" in text.lower() else 1


def usable_cores(root: Path = _ROOT) -> int:
    """Count the processors that affinity and CPU quota allow this process to keep busy."""
    allowed = len(allowed_processors())
    return min(allowed, cpu_limit(root) or allowed)


def memory(root: Path = _ROOT) -> Memory:
    """Measure total and free memory within the limits of control groups; 0 if unknown."""
    total, free = _host_memory(root)
    for group in memory_limits(root):
        total = min(total, group.limit_bytes)
        free = min(free, max(group.limit_bytes - group.used_bytes, 0))
    return Memory(total_bytes=total, free_bytes=min(free, total))


def caches_bytes(root: Path = _ROOT) -> dict[str, int]:
    """Map the data caches of one processor, such as ``"l1d"`` and ``"l2"``, to their bytes."""
    processor = allowed_processors()[0]
    sizes = {}
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{processor}/cache").glob("index*")):
        level, kind, size = ("".join(_lines(folder / name)) for name in ("level", "type", "size"))
        if level and kind in ("Data", "Unified") and size[-1:] in _UNITS:
            name = f"l{level}" + ("d" if kind == "Data" else "")
            sizes[name] = int(size[:-1]) * _UNITS[size[-1]]
    return sizes


def numa_nodes(root: Path = _ROOT) -> dict[int, Sequence[int]]:
    """Map NUMA nodes to their logical processors; one node 0 with all processors if unknown."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        processors = _expand_ranges("".join(_lines(folder / "cpulist")))
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
    """Convert a page count of sysconf to bytes; 0 if unknown."""
    if name not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def listed(numbers: Sequence[int]) -> str:
    """Format numbers, sorted, as ranges such as ``"0-3,8"``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _expand_ranges(ranges: str) -> list[int]:
    """Parse ranges such as ``"0-3,8"`` into numbers."""
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
