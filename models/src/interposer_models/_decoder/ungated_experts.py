"""Experts without a gate (two matrices each), and the MoE layer of such experts.

Dimensions: T tokens, M rows, H hidden size, L size of the experts' input, I intermediate size,
E experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from interposer import BoundKernel, ExpertsSpec, PluggableLayer, Site
from interposer_models._decoder.grouped_mixture import GroupedRouter, Grouping
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_ops.activations import relu2
from interposer_ops.layers.expert_loop import ExpertLoop, tell_in_turn
from interposer_ops.layers.expert_stages import LocalDispatcher
from interposer_ops.layers.linear import Linear
from interposer_ops.linear import grouped_linear

_UP, _DOWN = "up_proj", "down_proj"
_BIAS = "gate.e_score_correction_bias"


class UngatedExperts(PluggableLayer):
    """Experts of two matrices with squared ReLU in between.

    Unquantized experts are grouped matmuls. Experts that the checkpoint's scheme quantizes are
    linear layers, computed one expert after the other.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.loop: ExpertLoop | None = None
        self.activate = site.bind(relu2, intermediate_size=spec.intermediate_size)
        self.operands: tuple[Tensor, ...] = ()
        self.bound: dict[str, BoundKernel[..., Tensor]] = {}
        # Grouped matmuls have no kernels for quantized experts without a gate.
        if _is_quantized(site, spec):
            self._add_layers(site, spec)
            return
        self.dispatcher = LocalDispatcher(site, spec)
        num_experts, sizes = spec.num_experts, (spec.hidden_size, spec.intermediate_size)
        for name, inputs, outputs in ((_UP, *sizes), (_DOWN, *sizes[::-1])):
            dims = {"in_features": inputs, "out_features": outputs}
            self.bound[name] = site.bind_kernel(grouped_linear, **dims, num_experts=num_experts)
            matrices = torch.empty(num_experts, outputs, inputs, dtype=site.dtype)
            parameter = nn.Parameter(matrices, requires_grad=False)
            # The loader stacks the experts' separate tensors into this parameter.
            parameter.expert_parts = {name: outputs}  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def _add_layers(self, site: Site, spec: ExpertsSpec) -> None:
        """Add two linear layers for each expert, in the storage form of the scheme."""
        self.loop = ExpertLoop(site, spec, self.activate)
        pairs = []
        for expert in range(spec.num_experts):
            expert_site = site.at(str(expert))
            up = Linear(expert_site.at(_UP), spec.hidden_size, spec.intermediate_size)
            down = Linear(expert_site.at(_DOWN), spec.intermediate_size, spec.hidden_size)
            tell_in_turn(site, up, down)
            self.add_module(str(expert), nn.ModuleList((up, down)))
            pairs.append((up, down))
        self.pairs = tuple(pairs)

    def finalize(self) -> None:
        """Prepare both matrices for the kernels."""
        weights = {name: self.get_parameter(name) for name in self.bound}
        prepared = {
            name: self.bound[name].prepared(weight=w)["weight"] for name, w in weights.items()
        }
        for name, weight in weights.items():
            # The prepared copy replaces the parameter, so that memory is not used twice.
            if prepared[name] is not weight:
                self.register_parameter(name, None)
        self.operands = tuple(prepared.values())

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for ``x`` ``[T, L]``."""
        if self.loop is not None:
            return self.loop(x, self.pairs, weights, expert_ids)
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        (up, down), starts = self.operands, starts.long()
        hidden = self.activate(self.bound[_UP].function(rows, up, starts))
        expert_rows = self.bound[_DOWN].function(hidden, down, starts)
        return self.dispatcher.finalize(expert_rows, receipt)


class UngatedMoE(nn.Module):
    """An MoE layer of experts without a gate, with group-limited routing and a shared expert.

    Args:
        spec: of the experts, with the hidden size as input size.
        shared_size: intermediate size of the shared expert.
        latent_size: L; 0 if experts read the hidden states directly.
        bias: of all projections except the experts'.
    """

    def __init__(
        self,
        site: Site,
        spec: ExpertsSpec,
        grouping: Grouping,
        shared_size: int,
        latent_size: int,
        bias: bool,
    ) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.router = GroupedRouter(site.at("gate"), spec, grouping, f"{site.prefix}.{_BIAS}")
        self.into = self.out = None
        if latent_size:
            self.into = Linear(site.at("fc1_latent_proj"), hidden, latent_size, bias)
            self.out = Linear(site.at("fc2_latent_proj"), latent_size, hidden, bias)
            spec = replace(spec, hidden_size=latent_size)
        self.experts = UngatedExperts(site.at("experts"), spec)
        sizes, names = (hidden, shared_size), (_UP, _DOWN)
        self.shared = PlainMLP(site.at("shared_experts"), sizes, names, spec.activation, bias)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x if self.into is None else self.into(x)
        routed: Tensor = self.experts(inputs, *self.router(x))
        return (routed if self.out is None else self.out(routed)) + self.shared(x)  # type: ignore[no-any-return]


def _is_quantized(site: Site, spec: ExpertsSpec) -> bool:
    """Say whether the scheme quantizes any matrix of the experts."""
    scheme = site.resolver.scheme
    if scheme is None or scheme.experts_method(site.prefix) is None:
        return False
    return any(
        scheme.linear_method(f"{site.prefix}.{expert}.{name}", (name,)) is not None
        for expert in range(spec.num_experts)
        for name in (_UP, _DOWN)
    )
