"""Collectives of layers, each bound when its layer is built. T rows, N ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interposer import Communicator, Site

__all__ = ["bind_all_gather", "bind_all_reduce"]

_FEW_ROWS = 64
_MANY_ROWS = 1024

Reduce = Callable[[Tensor], Tensor]


def bind_all_reduce(site: Site, width: int, dtype: torch.dtype | None = None) -> Reduce:
    """Return what adds ``[T, width]`` up over the ranks; its argument may be overwritten.

    What is best for the rows of a decode step need not be so for those of a prompt, so that one
    communicator is chosen for each, which may be the same. Where ranks are only described nothing
    can be called.
    """
    few, many = (_chosen(site, "all_reduce", width, rows, dtype) for rows in (1, _MANY_ROWS))
    if few is None or many is None:
        return _uncallable
    if few is many:
        return few.all_reduce
    limit = _FEW_ROWS * width

    def reduce(x: Tensor) -> Tensor:
        return few.all_reduce(x) if x.numel() <= limit else many.all_reduce(x)

    return reduce


def bind_all_gather(site: Site, sizes: Sequence[int]) -> Reduce:
    """Return what puts ``[T, sizes[rank]]`` of all ranks side by side, ``[T, sum(sizes)]``."""
    ranks = site.resolver.ranks
    assert ranks is not None
    found = _chosen(site, "all_gather", sizes[ranks.rank], 1, None)
    if found is None:
        return _uncallable
    communicator = found

    def gather(x: Tensor) -> Tensor:
        return communicator.all_gather(x.mT.contiguous(), sizes).mT

    return gather


def _chosen(
    site: Site, collective: str, width: int, rows: int, dtype: torch.dtype | None
) -> Communicator | None:
    kind = dtype or site.dtype
    num_bytes = rows * width * kind.itemsize
    return site.resolver.communicator(collective, kind, num_bytes, site.prefix)[1]


def _uncallable(x: Tensor) -> Tensor:
    raise RuntimeError("the ranks are only described, so that they cannot exchange anything")
