"""Bound kernels where torch's compiler traces a model.

A traceable kernel is traced: the graph holds what it calls, and its operands are inputs. The
weights of others may be no tensors that a compiler could look into, and the kernel no Python at
all. There the compiler sees one op with the number of a place. What is not compiled calls the
kernel itself, without anything in between.

The number is a tensor: a graph takes that as an input, so that all layers of a model share what is
compiled for one. A name would be a constant of the graph, and each layer compiled for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PlacedKernel", "look_up", "mix", "multiply", "new_place", "place_call"]

_numbers = itertools.count()
_CALLS: dict[int, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {}
_NAMESPACE = "interposer_vllm"


def new_place() -> Tensor:
    """Return the number of a place, int64, for which no call is known yet."""
    return torch.tensor(next(_numbers), device="cpu")


def place_call(place: Tensor, kernel: Callable[..., Tensor], operands: tuple[Any, ...]) -> None:
    """Let the ops find at ``place`` what to call; again, it replaces what was there."""
    _CALLS[int(place)] = kernel, operands


def multiply(x: Tensor, place: Tensor, out_features: int) -> Tensor:
    """Return the product of ``x`` ``[..., I]`` at ``place``, ``[..., O]``, as an op."""
    product: Tensor = torch.ops.interposer_vllm.multiply(x, place, out_features)
    return product


def look_up(token_ids: Tensor, place: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of ``token_ids`` ``[T]`` at ``place``, ``[T, H]``, as an op."""
    rows: Tensor = torch.ops.interposer_vllm.look_up(token_ids, place, hidden_size, dtype)
    return rows


def mix(x: Tensor, place: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Return what experts at ``place`` make of ``x`` ``[T, H]``, added up by weights, as an op."""
    mixture: Tensor = torch.ops.interposer_vllm.mix(x, place, weights, expert_ids)
    return mixture


class PlacedKernel:
    """A kernel with its operands, and the form that it has in graphs.

    Attributes:
        kernel: None before it is bound.
    """

    def __init__(self) -> None:
        self.place = new_place()
        self.is_traceable = False
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    def bind(
        self, kernel: Callable[..., Tensor], operands: tuple[Any, ...], is_traceable: bool
    ) -> None:
        """Call ``kernel`` with ``operands`` behind the input from now on.

        Args:
            is_traceable: torch's compiler can see into the kernel.
        """
        self.kernel, self.operands, self.is_traceable = kernel, operands, is_traceable
        place_call(self.place, kernel, operands)

    def multiply(self, x: Tensor, out_features: int) -> Tensor:
        """Return the product of ``x`` ``[..., I]``, ``[..., O]``."""
        if torch.compiler.is_compiling() and not self.is_traceable:
            return multiply(x, self.place, out_features)
        return self.kernel(x, *self.operands)  # type: ignore[misc]

    def look_up(self, token_ids: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of ``token_ids`` ``[T]``, ``[T, H]``."""
        if torch.compiler.is_compiling() and not self.is_traceable:
            return look_up(token_ids, self.place, hidden_size, dtype)
        return self.kernel(token_ids, *self.operands)  # type: ignore[misc]


def _call(x: Tensor, place: Tensor, *_: Any) -> Tensor:
    kernel, operands = _CALLS[int(place)]
    return kernel(x, *operands)


def _call_mixture(x: Tensor, place: Tensor, *routing: Tensor) -> Tensor:
    kernel, operands = _CALLS[int(place)]
    return kernel(x, *operands, *routing)


def _fake_mixture(x: Tensor, place: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_product(x: Tensor, place: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_rows(x: Tensor, place: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape, hidden_size), dtype=dtype)


# One for the process: what it defines is gone with it.
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
for _schema, _calls, _fake in (
    ("multiply(Tensor x, Tensor place, int out_features) -> Tensor", _call, _fake_product),
    (
        "look_up(Tensor x, Tensor place, int hidden_size, ScalarType dtype) -> Tensor",
        _call,
        _fake_rows,
    ),
    (
        "mix(Tensor x, Tensor place, Tensor weights, Tensor expert_ids) -> Tensor",
        _call_mixture,
        _fake_mixture,
    ),
):
    _LIBRARY.define(_schema)
    _name = f"{_NAMESPACE}::{_schema.partition('(')[0]}"
    torch.library.impl(_name, ("cpu", "cuda", "xpu"), _calls, lib=_LIBRARY)
    torch.library.register_fake(_name, _fake, lib=_LIBRARY)
