"""Calls of bound kernels from graphs that torch's compiler traces.

A traceable kernel is traced: the graph contains the kernel's ops and takes operands as inputs. For
an opaque kernel the graph contains one op of this module with a slot, a number that identifies the
kernel and the operands in a table of this process. Eager code calls the kernel directly.

A slot is a tensor, so that a graph takes the slot as an input and all layers of a model share one
compiled graph. A string would be a constant of the graph, and each layer would be compiled
separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SlotKernel", "look_up", "mix", "multiply", "new_slot", "register_call"]

_numbers = itertools.count()
# The kernel and the operands of each slot.
_CALLS: dict[int, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {}
_NAMESPACE = "interposer_vllm"


def new_slot() -> Tensor:
    """Return a new slot, a scalar int64 tensor, for which no call is registered yet."""
    return torch.tensor(next(_numbers), device="cpu")


def register_call(slot: Tensor, kernel: Callable[..., Tensor], operands: tuple[Any, ...]) -> None:
    """Register ``kernel`` with ``operands`` as the call that the torch ops make for ``slot``."""
    _CALLS[int(slot)] = kernel, operands


def multiply(x: Tensor, slot: Tensor, out_features: int) -> Tensor:
    """Multiply ``x`` ``[..., I]`` by the weight at ``slot``, as an op that returns ``[..., O]``."""
    output: Tensor = torch.ops.interposer_vllm.multiply(x, slot, out_features)
    return output


def look_up(token_ids: Tensor, slot: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Look up the rows of ``token_ids`` ``[T]`` at ``slot``, as an op that returns ``[T, H]``."""
    rows: Tensor = torch.ops.interposer_vllm.look_up(token_ids, slot, hidden_size, dtype)
    return rows


def mix(x: Tensor, slot: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Compute the weighted sum of the experts at ``slot``, as an op that returns ``[T, H]``."""
    output: Tensor = torch.ops.interposer_vllm.mix(x, slot, weights, expert_ids)
    return output


class SlotKernel:
    """A bound kernel that compiled graphs can call through a slot.

    Attributes:
        slot: identifies the kernel in graphs.
        kernel: None before ``bind``.
    """

    def __init__(self) -> None:
        self.slot = new_slot()
        self.is_traceable = False
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    def bind(
        self, kernel: Callable[..., Tensor], operands: tuple[Any, ...], is_traceable: bool
    ) -> None:
        """Bind ``kernel`` to ``operands``, which follow the input in each call.

        Args:
            is_traceable: torch's compiler can trace the kernel.
        """
        self.kernel, self.operands, self.is_traceable = kernel, operands, is_traceable
        register_call(self.slot, kernel, operands)

    def multiply(self, x: Tensor, out_features: int) -> Tensor:
        """Multiply ``x`` ``[..., I]`` by the bound weight; the result is ``[..., O]``."""
        if torch.compiler.is_compiling() and not self.is_traceable:
            return multiply(x, self.slot, out_features)
        return self.kernel(x, *self.operands)  # type: ignore[misc]

    def look_up(self, token_ids: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Look up the rows ``[T, H]`` of ``token_ids`` ``[T]`` in the bound table."""
        if torch.compiler.is_compiling() and not self.is_traceable:
            return look_up(token_ids, self.slot, hidden_size, dtype)
        return self.kernel(token_ids, *self.operands)  # type: ignore[misc]


def _call(x: Tensor, slot: Tensor, *_: Any) -> Tensor:
    kernel, operands = _CALLS[int(slot)]
    return kernel(x, *operands)


def _call_experts(x: Tensor, slot: Tensor, *routing: Tensor) -> Tensor:
    kernel, operands = _CALLS[int(slot)]
    return kernel(x, *operands, *routing)


def _fake_experts(x: Tensor, slot: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_matmul(x: Tensor, slot: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_rows(x: Tensor, slot: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape, hidden_size), dtype=dtype)


# Kept for the life of the process: the ops are unregistered when this object is freed.
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
for _schema, _implementation, _fake in (
    ("multiply(Tensor x, Tensor slot, int out_features) -> Tensor", _call, _fake_matmul),
    (
        "look_up(Tensor x, Tensor slot, int hidden_size, ScalarType dtype) -> Tensor",
        _call,
        _fake_rows,
    ),
    (
        "mix(Tensor x, Tensor slot, Tensor weights, Tensor expert_ids) -> Tensor",
        _call_experts,
        _fake_experts,
    ),
):
    _LIBRARY.define(_schema)
    _name = f"{_NAMESPACE}::{_schema.partition('(')[0]}"
    torch.library.impl(_name, ("cpu", "cuda", "xpu"), _implementation, lib=_LIBRARY)
    torch.library.register_fake(_name, _fake, lib=_LIBRARY)
