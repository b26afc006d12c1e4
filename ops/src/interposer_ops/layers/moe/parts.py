"""Parts of an MoE layer that a platform's decoder block may compute in one call.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.moe.experts import Experts
from interposer_ops.layers.moe.router import Router

__all__ = ["HasMoEParts", "MoEParts"]


@dataclass(frozen=True)
class MoEParts:
    """The parts of an MoE layer, whose computation for ``x`` ``[T, H]`` is one of:

        experts(x, *router(x))
        experts(x, *router(x)) + shared(x)
        experts(x, *router(x)) + sigmoid(shared_gate(x)) * shared(x)

    Each result is rounded to the dtype of ``x``.

    Attributes:
        shared: the shared expert, or None.
        shared_gate: one output per token, or None.
    """

    router: Router
    experts: Experts
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None


class HasMoEParts(Protocol):
    """An MoE layer that lets a decoder block compute its parts."""

    def moe_parts(self) -> MoEParts | None:
        """Return the parts; None if the layer computes anything else than ``MoEParts`` says."""
        ...
