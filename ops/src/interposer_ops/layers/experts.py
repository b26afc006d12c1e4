"""Mixtures of experts: the router that chooses them, and the experts themselves.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
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
    """Choose the experts of each token by a projection, and weight them by a softmax.

    Args:
        renormalize: the softmax is over the chosen experts, else over all of them.
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
        """Bind what chooses the experts; a subclass may choose in another way."""
        self.select = site.bind(topk_softmax, **sizes, renormalize=self.renormalize)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids of the experts for the logits ``[T, E]``."""
        return self.select(logits, self.top_k, self.renormalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return weights ``[T, K]`` float32 and ids ``[T, K]`` int32 for ``x`` ``[T, H]``."""
        return self.choose(super().forward(x))


class PlainExperts(ExpertsMethod):
    """Unquantized matrices ``gate_up_proj`` and ``down_proj`` of all experts, and their biases.

    They are held as ``fused_experts`` takes them; what is stored in another order is copied once.
    Where checkpoints store every matrix by itself, ``expert_parts`` of a parameter states their
    names and how many of an expert's outputs each of them has.

    Args:
        is_staged: the kernel is that of ``GroupedProducts``.
    """

    def __init__(self, is_staged: bool = False) -> None:
        self.is_staged = is_staged

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register both matrices and, if they have some, their biases."""
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
        """Return the bound kernel with its weights, prepared if it wants them so."""
        constants = taken_matrices(layer, self.spec)
        if self.is_staged:
            return self.products, self.products.operands(**constants)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)


class Experts(PluggableLayer):
    """Routed experts; the scheme of the checkpoint decides how their weights are stored.

    Args:
        spec: of the experts that the layer holds.
        dispatcher: sends the tokens to experts, which may be on other ranks. Without one, the
            layer holds all of them and computes them by one kernel. A plugin that replaces the
            layer ``"experts"`` reaches every model: its subclass passes a dispatcher on.
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
        # A row that is sent to an expert is a token with this one choice.
        self.method.create_weights(self, site, replace(spec, top_k=1) if is_staged else spec)
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    def finalize(self) -> None:
        """Hand the loaded weights to the method, which says what to call with which operands."""
        self.kernel, self.operands = self.method.finalize(self)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``."""
        if self.dispatcher is None:
            routing = weights, expert_ids, self.spec.activation
            return self.kernel(x, *self.operands, *routing)  # type: ignore[misc]
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        return self.dispatcher.finalize(self.compute(rows, starts), receipt)

    def compute(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return what experts make of the rows of a ``Dispatched``, where there is a dispatcher."""
        if self.is_grouped:
            return self.kernel(rows, *self.operands, starts)  # type: ignore[misc]
        experts = row_experts(starts, len(rows))[:, None]
        ones = torch.ones(experts.shape, device=rows.device)
        return self.kernel(rows, *self.operands, ones, experts, self.spec.activation)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        spec = self.spec
        return f"{spec.num_experts} x ({spec.hidden_size}, {spec.intermediate_size}), {spec.top_k}"


def gates_first(alternating: Tensor) -> Tensor:
    """Return outputs that alternate along dimension 1 with the even ones before the odd ones."""
    return torch.cat((alternating[:, ::2], alternating[:, 1::2]), 1)


def register_matrices(layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
    """Register what ``PlainExperts`` says, in the model's dtype."""
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
    """Take away what ``register_matrices`` registered, and return the constants of the op.

    Those are ``gate_up`` ``[E, 2 I, H]``, gates first, ``gate_up_bias``, ``down`` ``[E, H, I]`` and
    ``down_bias``.
    """
    gate_up, down = _matrices(layer, spec)
    gate_up_bias, down_bias = (layer._parameters[f"{name}_bias"] for name in _MATRICES.values())
    if gate_up_bias is not None and spec.alternating:
        gate_up_bias = gates_first(gate_up_bias)  # type: ignore[assignment]
    # Held twice they would double the memory.
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
