"""Routed experts, in one fused kernel or as grouped GEMMs with an activation between them.

Dimensions: T tokens, M rows, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsMethod, ExpertsSpec, PluggableLayer, Site
from interposer.errors import RequestError
from interposer_ops.activations._activations import (
    gelu_and_mul,
    silu_and_mul,
    swiglu_oai_and_mul,
)
from interposer_ops.experts._experts import SWIGLU_ALPHA, SWIGLU_LIMIT, fused_experts
from interposer_ops.layers.moe.dispatcher import ExpertDispatcher
from interposer_ops.linear._linear import grouped_linear

__all__ = [
    "ExpertActivation",
    "Experts",
    "GroupedExperts",
    "PlainExperts",
    "gates_first",
    "interleaved",
    "register_matrices",
    "row_experts",
    "take_matrices",
]

_MATRICES = {"gate_up": "gate_up_proj", "down": "down_proj"}


class PlainExperts(ExpertsMethod):
    """Unquantized matrices ``gate_up_proj`` and ``down_proj`` of all experts, and their biases.

    The matrices are kept in the layout of ``fused_experts``; another stored layout is converted
    once. If the checkpoint stores every matrix separately, the parameter's ``expert_parts`` maps
    the matrix names to their numbers of outputs.

    Args:
        is_staged: use ``GroupedExperts`` instead of ``fused_experts``.
    """

    def __init__(self, is_staged: bool = False) -> None:
        self.is_staged = is_staged

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register both matrices and, if ``spec`` has biases, the biases."""
        self.spec = spec
        if self.is_staged:
            self.grouped = GroupedExperts(site, spec)
        else:
            self.bound = site.bind_kernel(fused_experts, **spec.dims())
        register_matrices(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        gate_up, down = _matrices(layer, self.spec)
        return gate_up.double(), down.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its weights, prepared if the kernel requires preparation."""
        constants = take_matrices(layer, self.spec)
        if self.is_staged:
            return self.grouped, self.grouped.operands(**constants)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)


class Experts(PluggableLayer):
    """Routed experts; the checkpoint's quantization scheme decides the storage format.

    Args:
        spec: the experts that the layer holds.
        dispatcher: sends tokens to experts, possibly on other ranks. Without a dispatcher the layer
            holds all experts and one kernel computes them. A plugin that replaces the layer
            ``"experts"`` by a subclass with a dispatcher reaches every model.
    """

    layer_id = "experts"
    reduces = True

    def __init__(
        self, site: Site, spec: ExpertsSpec, dispatcher: ExpertDispatcher | None = None
    ) -> None:
        super().__init__(site)
        self.spec, self.dispatcher = spec, dispatcher
        is_staged = dispatcher is not None
        scheme = site.resolver.scheme
        method = scheme.experts_method(site.prefix) if scheme else None
        self.is_grouped = is_staged and method is None
        self.method = method or PlainExperts(is_staged)
        # To the kernel, each dispatched row is a token with exactly one chosen expert.
        self.method.create_weights(self, site, replace(spec, top_k=1) if is_staged else spec)
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    def finalize(self) -> None:
        """Let the experts method turn the loaded weights into a kernel and operands."""
        self.kernel, self.operands = self.method.finalize(self)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute the weighted sum ``[T, H]`` of the chosen experts' outputs."""
        if self.dispatcher is None:
            routing = weights, expert_ids, self.spec.activation
            return self.kernel(x, *self.operands, *routing)  # type: ignore[misc]
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        return self.dispatcher.finalize(self.compute(rows, starts), receipt)

    def compute(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute the experts for the rows ``[M, H]`` of a ``Dispatched``; needs a dispatcher."""
        if self.is_grouped:
            return self.kernel(rows, *self.operands, starts)  # type: ignore[misc]
        experts = row_experts(starts, len(rows))[:, None]
        ones = torch.ones(experts.shape, device=rows.device)
        return self.kernel(rows, *self.operands, ones, experts, self.spec.activation)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Format the sizes for ``repr``."""
        spec = self.spec
        return f"{spec.num_experts} x ({spec.hidden_size}, {spec.intermediate_size}), {spec.top_k}"


def gates_first(alternating: Tensor) -> Tensor:
    """Reorder alternating outputs of dimension 1: all even ones, then all odd ones."""
    return torch.cat((alternating[:, ::2], alternating[:, 1::2]), 1)


def register_matrices(layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
    """Register the parameters of ``PlainExperts`` in the model's dtype."""
    count, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    for name, (outputs, inputs) in shapes.items():
        shape = (inputs, outputs) if spec.inputs_first else (outputs, inputs)
        matrices = torch.empty(count, *shape, dtype=site.dtype)
        parameter = nn.Parameter(matrices, requires_grad=False)
        if spec.projections is not None:
            gate, up, second = spec.projections
            parts = {gate: inner, up: inner} if name == "gate_up_proj" else {second: hidden}
            parameter.expert_parts = parts  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)
        offsets = torch.empty(count, outputs, dtype=site.dtype) if spec.biased else None
        bias = None if offsets is None else nn.Parameter(offsets, requires_grad=False)
        layer.register_parameter(f"{name}_bias", bias)


def take_matrices(layer: nn.Module, spec: ExpertsSpec) -> dict[str, Any]:
    """Remove the parameters of ``register_matrices`` from the layer, and return op constants.

    Returns: ``gate_up`` ``[E, 2 I, H]``, gates first, ``gate_up_bias``, ``down`` ``[E, H, I]`` and
        ``down_bias``.
    """
    gate_up, down = _matrices(layer, spec)
    gate_up_bias, down_bias = (layer._parameters[f"{name}_bias"] for name in _MATRICES.values())
    if gate_up_bias is not None and spec.alternating:
        gate_up_bias = gates_first(gate_up_bias)  # type: ignore[assignment]
    # The kernel's copies may differ from the parameters; keeping both would double the memory.
    for name in _MATRICES.values():
        layer.register_parameter(name, None)
        layer.register_parameter(f"{name}_bias", None)
    return {
        "gate_up": gate_up,
        "gate_up_bias": gate_up_bias,
        "down": down,
        "down_bias": down_bias,
    }


def _matrices(layer: nn.Module, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Return ``[E, 2 I, H]``, gates first, and ``[E, H, I]``, contiguous."""
    gate_up, down = (layer.get_parameter(name).data for name in _MATRICES.values())
    if spec.inputs_first:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if spec.alternating:
        gate_up = gates_first(gate_up)
    return gate_up.contiguous(), down.contiguous()


class ExpertActivation:
    """Gated activation between the two grouped GEMMs of experts, as an op that rounds its result.

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
        """Apply the gated activation to ``[M, 2 I]``; the result is ``[M, I]``."""
        return self.activate(projected, *self.options)


class GroupedExperts:
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
        self.activate = ExpertActivation(site, spec)

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
    """Interleave the two halves of dimension 1, starting with the first half."""
    return torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)
