"""MoE layers: the router that chooses experts, and the experts.

Dimensions: T tokens, M rows, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsMethod, ExpertsSpec, PluggableLayer, Site
from interposer_ops.experts._experts import fused_experts
from interposer_ops.experts._routing import topk_softmax
from interposer_ops.layers.expert_stages import ExpertDispatcher, GroupedProducts, row_experts
from interposer_ops.layers.wide_linear import WideLinear

__all__ = [
    "Experts",
    "PlainExperts",
    "Router",
    "gates_first",
    "register_matrices",
    "taken_matrices",
]

_MATRICES = {"gate_up": "gate_up_proj", "down": "down_proj"}


class Router(WideLinear):
    """Choose the top-k experts of each token by a linear layer, and weight them by a softmax.

    Args:
        renormalize: compute the softmax over the chosen experts; False: over all experts.
    """

    layer_id = "router"

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        bias: bool = False,
    ) -> None:
        super().__init__(site, hidden_size, num_experts, bias)
        self.top_k, self.renormalize = top_k, renormalize
        sizes = {"num_experts": num_experts, "top_k": top_k}
        self.bind_choice(replace(site, dtype=self.dtype), sizes)

    def bind_choice(self, site: Site, sizes: Mapping[str, int]) -> None:
        """Bind the op that chooses the experts; a subclass may bind another op."""
        self.select = site.bind(topk_softmax, **sizes, renormalize=self.renormalize)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and expert ids ``[T, K]`` for logits ``[T, E]``."""
        return self.select(logits, self.top_k, self.renormalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Choose the experts of ``x`` ``[T, H]``.

        Returns: weights ``[T, K]`` float32 and expert ids ``[T, K]`` int32.
        """
        return self.choose(super().forward(x))


class PlainExperts(ExpertsMethod):
    """Unquantized matrices ``gate_up_proj`` and ``down_proj`` of all experts, and their biases.

    The matrices are kept in the layout of ``fused_experts``; another stored layout is converted
    once. If the checkpoint stores every matrix separately, the parameter's ``expert_parts`` maps
    the matrix names to their numbers of outputs.

    Args:
        is_staged: use ``GroupedProducts`` instead of ``fused_experts``.
    """

    def __init__(self, is_staged: bool = False) -> None:
        self.is_staged = is_staged

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register both matrices and, if ``spec`` has biases, the biases."""
        self.spec = spec
        if self.is_staged:
            self.products = GroupedProducts(site, spec)
        else:
            self.bound = site.bind_kernel(fused_experts, **spec.dims())
        register_matrices(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        gate_up, down = _matrices(layer, self.spec)
        return gate_up.double(), down.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its weights, prepared if the kernel requires preparation."""
        constants = taken_matrices(layer, self.spec)
        if self.is_staged:
            return self.products, self.products.operands(**constants)
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


def taken_matrices(layer: nn.Module, spec: ExpertsSpec) -> dict[str, Any]:
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
