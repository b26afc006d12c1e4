"""The share that a rank has of the cores of its host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from interposer import Platform


@contextmanager
def own_cores(platform: Platform, rank: int, size: int) -> Iterator[None]:
    """Compute on as many cores as each of the ranks of this host has, within a ``with`` block.

    Nothing changes where the platform does not bind threads, or there are fewer cores than ranks.
    """
    if not all(platform.provides(member) for member in ("cores", "bind_threads")):
        yield
        return
    cores = sorted(platform.cores(), key=min)
    share, threads = len(cores) // size, torch.get_num_threads()
    if not share:
        yield
        return
    own = cores[rank * share : (rank + 1) * share]
    platform.bind_threads([core[0] for core in own])
    try:
        yield
    finally:
        platform.bind_threads([processor for core in cores for processor in core])
        torch.set_num_threads(threads)
