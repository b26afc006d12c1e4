"""The share of the host's CPU cores that a rank uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from interposer import Platform


@contextmanager
def bound_to_share_of_cores(platform: Platform, rank: int, size: int) -> Iterator[None]:
    """Bind threads to an equal share of the host's cores, within a ``with`` block.

    Nothing changes if the platform cannot bind threads, or has fewer cores than ranks.
    """
    if not all(platform.provides(member) for member in ("cores", "bind_threads")):
        yield
        return
    # A core is a set of processors, which are its hardware threads. Use one thread per core.
    cores = sorted(platform.cores(), key=min)
    num_cores, num_threads = len(cores) // size, torch.get_num_threads()
    if not num_cores:
        yield
        return
    rank_cores = cores[rank * num_cores : (rank + 1) * num_cores]
    platform.bind_threads([core[0] for core in rank_cores])
    try:
        yield
    finally:
        platform.bind_threads([processor for core in cores for processor in core])
        torch.set_num_threads(num_threads)
