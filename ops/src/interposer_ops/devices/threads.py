"""The processors that this process computes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interposer import Config, Platform, Verdict, place
from interposer.errors import ConfigError

__all__ = ["bind_threads"]


def bind_threads(
    *,
    node: int | None = None,
    reserve: int = 0,
    siblings: bool = False,
    config: Config | None = None,
) -> Verdict:
    """Run this process's threads on some of its cores, one thread on each, and say which.

    To be called before a model is loaded: memory is then taken near the processors that read it.
    Where the system denies it, as in some containers, the verdict says why and nothing changed.

    Args:
        node: of NUMA; None takes the cores of all.
        reserve: how many cores are left to other programs, the lowest ones first, because systems
            serve most of their interrupts there.
        siblings: take all logical processors of a core. They share its arithmetic units, so that
            more than one thread seldom computes faster.
        config: policy that chooses the platform.
    Raises: ConfigError: ``reserve`` is no number of cores or leaves none, or the node is unknown.
    """
    if not isinstance(reserve, int) or reserve < 0:
        raise ConfigError(f"reserve is {reserve!r}, must be a number of cores, 0 or more")
    platform = place(config).platform
    for member in ("cores", "bind_threads"):
        provided = platform.provides(member)
        if not provided:
            return provided
    cores = _cores_of(platform, node)
    if reserve >= len(cores):
        where = "" if node is None else f" of node {node}"
        raise ConfigError(
            f"reserve is {reserve}, but this process may use {len(cores)} cores{where}. "
            f"Try: reserve={max(len(cores) - 1, 0)}"
        )
    kept = cores[reserve:]
    return platform.bind_threads([p for core in kept for p in (core if siblings else core[:1])])


def _cores_of(platform: Platform, node: int | None) -> list[Sequence[int]]:
    """Return the cores that this process may use, those of one node where it is given."""
    cores = sorted(platform.cores(), key=min)
    if node is None:
        return cores
    nodes: Mapping[int, Sequence[int]] = (
        platform.numa_nodes() if platform.provides("numa_nodes") else {}
    )
    if node not in nodes:
        listed = ", ".join(map(str, nodes)) or "none"
        raise ConfigError(f"there is no NUMA node {node!r}. This machine has: {listed}")
    return [core for core in cores if core[0] in nodes[node]]
