"""Collectives of sharded layers; the message size decides which communicator is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from interposer import Choice, Communicator, Site

__all__ = ["AllReduce"]

_FEW_ROWS = 64
MANY_ROWS = 1024
"""Typical rows of a prefill step. Decode steps have fewer rows, one per sequence."""


class AllReduce:
    """Sum ``[T, width]`` over the ranks; the argument may be overwritten.

    The fastest communicator for a decode step may not be the fastest for a prefill step, so one is
    chosen for each size; both may be the same. If the ranks are only described (a plan without
    processes), the object exists but cannot be called.

    Attributes:
        communicators, choices, num_bytes: one for few rows, one for many rows.
        limit: largest number of elements that count as few rows.
    """

    def __init__(self, site: Site, width: int, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or site.dtype
        # Communicators are chosen by message size: one row (decode) and a prompt's rows (prefill).
        sizes = width, MANY_ROWS * width
        self.num_bytes = tuple(size * self.dtype.itemsize for size in sizes)
        chosen = [choose_communicator(site, "all_reduce", size, self.dtype) for size in sizes]
        self.choices: tuple[Choice, ...] = tuple(choice for choice, _ in chosen)
        self.communicators: tuple[Any, ...] = tuple(communicator for _, communicator in chosen)
        self.limit = _FEW_ROWS * width
        calls = [c.all_reduce if c is not None else uncallable for c in self.communicators]
        self._reduce_few, self._reduce_many = calls

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks."""
        return self._reduce_few(x) if x.numel() <= self.limit else self._reduce_many(x)


def bind_all_gather(site: Site, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that all-gathers and concatenates the columns of the ranks.

    The function maps ``[T, sizes[rank]]`` of each rank to ``[T, sum(sizes)]``.
    """
    ranks = site.resolver.ranks
    assert ranks is not None
    _, chosen = choose_communicator(site, "all_gather", sizes[ranks.rank], site.dtype)
    if chosen is None:
        return uncallable
    communicator = chosen

    def gather(x: Tensor) -> Tensor:
        # ``all_gather`` concatenates rows, so the columns are gathered as rows of the transpose.
        return communicator.all_gather(x.mT.contiguous(), sizes).mT.contiguous()

    return gather


def choose_communicator(
    site: Site, collective: str, size: int, dtype: torch.dtype
) -> tuple[Choice, Communicator | None]:
    """Choose a communicator for messages of ``size`` elements per rank.

    Returns: the choice and its communicator; None as communicator if the ranks are only described.
    """
    num_bytes = size * dtype.itemsize
    return site.resolver.communicator(collective, dtype, num_bytes, site.prefix)


def uncallable(*_: object) -> Tensor:
    """Raise RuntimeError; replaces the collectives when a plan describes ranks that do not run."""
    raise RuntimeError("the ranks are only described, so they cannot exchange anything")
