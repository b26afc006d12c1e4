"""Experts in three stages: send rows to their experts, compute the experts, combine the results.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, I intermediate size, E experts of the
layer.
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
    """Rows sorted by the experts of the layer.

    Attributes:
        rows: ``[M, H]``, the rows of each expert are contiguous; M may be 0. Rows after those of
            the last expert are padding that no expert computes.
        starts: ``[E + 1]`` int32 or int64, the first row of each expert, then the end of the last.
        receipt: the dispatcher's data for returning the rows to their tokens.
    """

    rows: Tensor
    starts: Tensor
    receipt: Any


class ExpertDispatcher(ABC):
    """Sends tokens to their experts and combines the results, on this rank or over several ranks.

    A dispatcher belongs to one ``Experts`` layer. The expert ids are the router's, counted over all
    ranks; the prepared rows are for the experts of this layer only.
    """

    @abstractmethod
    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Collect the rows that the layer's experts must compute.

        Args:
            x: ``[T, H]``, the tokens of this rank.
            weights: ``[T, K]`` float32.
            expert_ids: ``[T, K]`` int32; -1 means no expert.
        """

    @abstractmethod
    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Combine the experts' results into the weighted sum ``[T, H]`` of each token.

        Args:
            rows: ``[M, H]``, the experts' results for the rows of ``prepare``, in the same order.
                Padding rows may hold anything.
            receipt: the receipt of the same ``Dispatched``.
        """


class LocalDispatcher(ExpertDispatcher):
    """Sorts the tokens' rows by expert, for a layer that holds all experts."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        self.num_experts = spec.num_experts
        sizes = {"hidden_size": spec.hidden_size, "top_k": spec.top_k}
        self.permute = site.bind(
            moe_permute, **sizes, num_experts=spec.num_experts, index_dtype="int32"
        )
        self.unpermute = site.bind(moe_unpermute, **sizes, weights_dtype="float32")

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return one row for each chosen expert of each token."""
        rows, positions, starts = self.permute(x, expert_ids, self.num_experts)
        return Dispatched(rows, starts, (positions, weights))

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return the weighted sums."""
        return self.unpermute(rows, *receipt)


class GatedActivation:
    """Gated activation between the projections of experts, as an op that rounds its result.

    Attributes:
        interleaves: inputs alternate between gate and up; False: all gates come first.

    Raises: RequestError: ``fused_experts`` has no such activation.
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
                alternatives = "'silu', 'gelu' or 'swiglu_oai'"
                raise RequestError(f"No activation {other!r} of experts; try {alternatives}")

    def __call__(self, projected: Tensor) -> Tensor:
        """Map ``[M, 2 I]`` to ``[M, I]``."""
        return self.activate(projected, *self.options)


class GroupedProducts:
    """Unquantized experts as two grouped GEMMs.

    The result is that of ``fused_experts`` with more roundings: each projection rounds to the dtype
    of the rows, before and after its bias is added.

    Raises: RequestError: ``fused_experts`` has no such activation.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        first = {"in_features": hidden, "out_features": 2 * inner}
        second = {"in_features": inner, "out_features": hidden}
        self.first = site.bind_kernel(grouped_linear, **first, num_experts=spec.num_experts)
        self.second = site.bind_kernel(grouped_linear, **second, num_experts=spec.num_experts)
        self.activate = GatedActivation(site, spec)

    def operands(
        self, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Convert the constants of ``fused_experts`` to the operands of ``__call__``."""
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
        """Compute ``[M, H]`` for rows ``[M, H]`` sorted by expert."""
        starts = starts.long()
        # Grouped GEMMs take no bias, so biases are gathered per row. Padding rows have no expert;
        # any valid index will do for them.
        experts = None
        if gate_up_bias is not None:
            experts = row_experts(starts, len(rows)).clamp(min=0)
        projected = _offset(self.first.function(rows, gate_up, starts), gate_up_bias, experts)
        hidden = self.activate(projected)
        return _offset(self.second.function(hidden, down, starts), down_bias, experts)


def row_experts(starts: Tensor, num_rows: int) -> Tensor:
    """Return the expert index of each row ``[M]`` int32; -1 for padding rows."""
    rows = torch.arange(num_rows, device=starts.device, dtype=starts.dtype)
    # An expert without rows has the same start as the next one; right=True skips it.
    experts = torch.searchsorted(starts[1:].contiguous(), rows, right=True, out_int32=True)
    return torch.where(rows < starts[-1], experts, -1)


def _offset(rows: Tensor, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias[experts]


def interleaved(halves: Tensor) -> Tensor:
    """Interleave the two halves of dimension 1: first half's entry, then second half's entry."""
    return torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)
