"""Collectives as opaque torch ops, for models compiled by torch.compile.

A compiled graph names a communicator by its number, as ops take no Python objects. The ops run in
Python, at about three microseconds per call, so that a lost rank raises the same RankError in a
compiled model as in any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "all_gather",
    "all_reduce_",
    "all_reduce_add_rms_norm",
    "all_to_all",
    "broadcast_",
    "number_of",
    "reduce_scatter",
]


class Collectives(Protocol):
    """Interface of the communicators that torch ops look up by number."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks in place and return ``x``."""
        ...


_LIBRARY = torch.library.Library("interposer_cpu", "FRAGMENT")
_NUMBERS = count()
# Weak: a graph does not keep a communicator alive.
_COMMUNICATORS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(communicator: Collectives) -> int:
    """Register a communicator under a new number, which is valid while the communicator lives."""
    number = next(_NUMBERS)
    _COMMUNICATORS[number] = communicator
    return number


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define an op that calls ``run`` with the communicator numbered by the op's last argument."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(
        name,
        lambda *arguments: run(_COMMUNICATORS[arguments[-1]], *arguments[:-1]),
        "CPU",
    )
    torch.library.register_fake(f"interposer_cpu::{name}", fake)
    return getattr(torch.ops.interposer_cpu, name)  # type: ignore[no-any-return]


def _fake_in_place(*arguments: Any) -> None:
    return None


def _reduce(ranks: Any, x: Tensor) -> None:
    ranks.all_reduce(x)


def _broadcast(ranks: Any, x: Tensor, source: int) -> None:
    ranks.broadcast(x, source)


def _rows_like(x: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _fake_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, number: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


def _norm(ranks: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    # The communicator overwrites x, but the op's schema promises not to.
    return ranks.all_reduce_add_rms_norm(x.clone(), *arguments)  # type: ignore[no-any-return]


def _fake_rows(x: Tensor, sizes: Sequence[int], number: int) -> Tensor:
    return _rows_like(x, sum(sizes))


# ``(a!)`` in a schema: the op writes the tensor.
all_reduce_ = _define("all_reduce_(Tensor(a!) x, int number) -> ()", _reduce, _fake_in_place)
broadcast_ = _define(
    "broadcast_(Tensor(a!) x, int source, int number) -> ()", _broadcast, _fake_in_place
)
all_gather = _define(
    "all_gather(Tensor x, int[] sizes, int number) -> Tensor",
    lambda ranks, x, sizes: ranks.all_gather(x, sizes),
    _fake_rows,
)
reduce_scatter = _define(
    "reduce_scatter(Tensor x, int[] sizes, int rank, int number) -> Tensor",
    lambda ranks, x, sizes, rank: ranks.reduce_scatter(x, sizes),
    lambda x, sizes, rank, number: _rows_like(x, sizes[rank]),
)
all_to_all = _define(
    "all_to_all(Tensor x, int[] sent, int[] received, int number) -> Tensor",
    lambda ranks, x, sent, received: ranks.all_to_all(x, sent, received),
    lambda x, sent, received, number: _rows_like(x, sum(received)),
)
all_reduce_add_rms_norm = _define(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, int number) "
    "-> (Tensor, Tensor)",
    _norm,
    _fake_norm,
)
