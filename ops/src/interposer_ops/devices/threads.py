"""Binding of this process's threads to CPU cores."""

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
    """Bind this process's threads to cores, one thread per core, and report which cores.

    Call this function before you load a model: the system then allocates the weights near the cores
    that read them. If the system denies the binding, as in some containers, the verdict says why
    and nothing changes.

    Args:
        node: NUMA node; None: cores of all nodes.
        reserve: number of cores left to other programs, lowest numbers first, because systems
            handle most interrupts there.
        siblings: use all logical processors of a core. They share arithmetic units, so more than
            one thread per core is rarely faster.
        config: policy that chooses the platform.
    Raises: ConfigError: ``reserve`` is not a number of cores or leaves none, or the node is
        unknown.
    """
    if not isinstance(reserve, int) or reserve < 0:
        raise ConfigError(f"reserve is {reserve!r}, must be a number of cores, 0 or more")
    platform = place(config).platform
    # Both members are optional in the platform contract; the refusal says which one is missing.
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
    bound_cores = cores[reserve:]
    return platform.bind_threads(
        [processor for core in bound_cores for processor in (core if siblings else core[:1])]
    )


def _cores_of(platform: Platform, node: int | None) -> list[Sequence[int]]:
    """Return the cores that this process may use, only those of ``node`` if not None."""
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
