"""Descriptions of this machine in sentences, for the output of command-line tools."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path

import torch

from interposer_cpu import _cgroup as cgroup
from interposer_cpu import _host as host
from interposer_cpu import native
from interposer_ops.devices.host_memory import huge_pages

_ROOT = Path("/")
_GIB = 2**30


def facts(root: Path = _ROOT) -> Mapping[str, str]:
    """Describe instructions, threads, memory and pages of this process, one sentence per topic.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    return {
        "native kernels": _native_kernels(),
        "processors": _processors(root),
        "threads": _threads(root),
        "memory": _memory(root),
        "huge pages": _huge_pages(root),
        "processes": _processes(root),
    }


def start_method(root: Path = _ROOT) -> str:
    """Choose the multiprocessing start method for worker processes.

    The system's default, except ``"spawn"`` in WSL, where a forked process cannot use the devices
    of its parent.
    """
    methods = multiprocessing.get_all_start_methods()  # the system's default comes first
    return "spawn" if host.wsl(root) else methods[0]


def _native_kernels() -> str:
    reason = native.why_absent()
    if reason:
        return f"none, so torch computes: {reason}"
    return f"{native.level()} in use; compiled for {', '.join(native.levels())}"


def _processors(root: Path) -> str:
    allowed, cores = host.allowed_processors(), host.cores(root)
    nodes = [n for n, processors in host.numa_nodes(root).items() if {*processors} & {*allowed}]
    text = f"{host.listed(allowed)}: {_count_text(len(cores), 'core')}"
    if len(allowed) > len(cores):
        text += f" of {len(allowed)} logical processors"
    return f"{text}, {_count_text(len(nodes), 'NUMA node')}"


def _threads(root: Path) -> str:
    threads, usable = torch.get_num_threads(), host.usable_cores(root)
    if threads <= usable:
        return str(threads)
    # usable_cores is the smaller of quota and affinity: name the one that limits.
    limit = cgroup.cpu_limit(root)
    why = "a control group" if limit == usable else "the affinity of this process"
    return (
        f"{threads}, but {why} grants the time of {usable}: they will wait for each other. "
        f"Try: OMP_NUM_THREADS={usable}"
    )


def _memory(root: Path) -> str:
    memory = host.memory(root)
    text = f"{memory.free_bytes / _GIB:.1f} GiB free of {memory.total_bytes / _GIB:.1f} GiB"
    limited = any(g.limit_bytes == memory.total_bytes for g in cgroup.memory_limits(root))
    return f"{text}, which is the limit of a control group" if limited else text


def _huge_pages(root: Path) -> str:
    verdict = huge_pages(root)
    return verdict.reason if verdict else f"not used: {verdict.reason}"


def _processes(root: Path) -> str:
    version, method = host.wsl(root), start_method(root)
    if not version:
        return f"are started by {method}"
    return f"are started by {method}, as this is WSL {version}, where forks lack devices"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
