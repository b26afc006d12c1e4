"""Experts in three stages: rows are sent to them, they compute, and what they return is added up.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, I intermediate size, E experts that
the layer holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interposer import ExpertsSpec, Site
from interposer.errors import RequestError
from interposer_ops.activations._activations import (
    gelu_and_mul,
    silu_and_mul,
    swiglu_oai_and_mul,
)
from interposer_ops.experts._expert_permutation import moe_permute, moe_unpermute
from interposer_ops.experts._experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from interposer_ops.linear._linear import grouped_linear

__all__ = [
    "Dispatched",
    "ExpertDispatcher",
    "GatedActivation",
    "GroupedProducts",
    "LocalDispatcher",
    "interleaved",
    "row_experts",
]


class Dispatched(NamedTuple):
    """Rows in the order of the experts that the layer holds.

    Attributes:
        rows: ``[M, H]``, those of each expert next to each other; M may be 0. Rows behind those
            of the last expert are computed by none.
        starts: ``[E + 1]`` int32 or int64, where the rows of each expert begin, and the end of all.
        receipt: what the dispatcher needs to return the rows to their tokens.
    """

    rows: Tensor
    starts: Tensor
    receipt: Any


class ExpertDispatcher(ABC):
    """Sends tokens to their experts and returns the results, here or on other ranks.

    A dispatcher belongs to one ``Experts`` layer. The ids that it gets are the router's, which
    counts the experts of all ranks; the rows that it prepares are for those of the layer.
    """

    @abstractmethod
    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return the rows that the layer's experts have to compute.

        Args:
            x: ``[T, H]``, the tokens of this rank.
            weights: ``[T, K]`` float32.
            expert_ids: ``[T, K]`` int32; -1 stands for no expert.
        """

    @abstractmethod
    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return ``[T, H]``: each token's results, times their weights, added up.

        Args:
            rows: ``[M, H]``, what the experts return for the rows of ``prepare``, in their order.
                Rows behind those of the last expert may hold anything.
            receipt: of the same ``Dispatched``.
        """


class LocalDispatcher(ExpertDispatcher):
    """Sorts the rows of the tokens by expert; the layer holds all experts."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        self.num_experts = spec.num_experts
        sizes = {"hidden_size": spec.hidden_size, "top_k": spec.top_k}
        held = spec.num_experts
        self.permute = site.bind(moe_permute, **sizes, num_experts=held, index_dtype="int32")
        self.unpermute = site.bind(moe_unpermute, **sizes, weights_dtype="float32")

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return a row for each choice of each token."""
        rows, positions, starts = self.permute(x, expert_ids, self.num_experts)
        return Dispatched(rows, starts, (positions, weights))

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return the weighted sums."""
        return self.unpermute(rows, *receipt)


class GatedActivation:
    """The activation between the projections of experts, as an op that rounds its result.

    Attributes:
        interleaves: it takes a gate, then what that acts on, in turn; else all gates come first.

    Raises: RequestError: the activation is not one that ``fused_experts`` knows.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        inner = spec.intermediate_size
        self.interleaves = spec.activation == "swiglu_oai"
        self.options: tuple[Any, ...] = ()
        self.activate: Callable[..., Tensor]
        match spec.activation:
            case "silu":
                self.activate = site.bind(silu_and_mul, intermediate_size=inner)
            case "gelu":
                self.options = ("none",)
                sizes = {"intermediate_size": inner}
                self.activate = site.bind(gelu_and_mul, **sizes, approximate="none")
            case "swiglu_oai":
                self.options = SWIGLU_ALPHA, SWIGLU_LIMIT
                self.activate = site.bind(swiglu_oai_and_mul, intermediate_size=inner)
            case other:
                known = "'silu', 'gelu' or 'swiglu_oai'"
                raise RequestError(f"No activation {other!r} of experts; try {known}")

    def __call__(self, projected: Tensor) -> Tensor:
        """Return ``[M, I]`` of ``[M, 2 I]``."""
        return self.activate(projected, *self.options)


class GroupedProducts:
    """Both projections of unquantized experts, as products of rows in groups.

    They compute what ``fused_experts`` does, with further roundings to the dtype of the rows: of
    each projection, and of what its bias is added to.

    Raises: RequestError: the activation is not one that ``fused_experts`` knows.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        first = {"in_features": hidden, "out_features": 2 * inner}
        second = {"in_features": inner, "out_features": hidden}
        held = spec.num_experts
        self.first = site.bind_kernel(grouped_linear, **first, num_experts=held)
        self.second = site.bind_kernel(grouped_linear, **second, num_experts=held)
        self.activate = GatedActivation(site, spec)

    def operands(
        self, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the constants of ``fused_experts`` as the call wants them."""
        if self.activate.interleaves:
            gate_up = interleaved(gate_up)
            gate_up_bias = None if gate_up_bias is None else interleaved(gate_up_bias)
        first = self.first.prepared(weight=gate_up)["weight"]
        return first, gate_up_bias, self.second.prepared(weight=down)["weight"], down_bias

    def __call__(
        self,
        rows: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        starts: Tensor,
    ) -> Tensor:
        """Return ``[M, H]`` of rows ``[M, H]`` in the order of their experts."""
        starts = starts.long()
        experts = None
        if gate_up_bias is not None:
            experts = row_experts(starts, len(rows)).clamp(min=0)
        projected = _offset(self.first.function(rows, gate_up, starts), gate_up_bias, experts)
        hidden = self.activate(projected)
        return _offset(self.second.function(hidden, down, starts), down_bias, experts)


def row_experts(starts: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row ``[M]`` int32, -1 of rows behind those of the last expert."""
    rows = torch.arange(num_rows, device=starts.device, dtype=starts.dtype)
    experts = torch.searchsorted(starts[1:].contiguous(), rows, right=True, out_int32=True)
    return torch.where(rows < starts[-1], experts, -1)


def _offset(rows: Tensor, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias[experts]


def interleaved(halves: Tensor) -> Tensor:
    """Return the outputs along dimension 1 in turn, one of the first half, one of the second."""
    return torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)
