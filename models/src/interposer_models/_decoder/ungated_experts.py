"""Experts of two matrices without a gate, and the mixture that has them.

Dimensions: T tokens, M rows, H hidden size, L size of what experts read, I intermediate size, E
experts.
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
    """Experts of two matrices with the square of ReLU between them.

    Unquantized ones are products of rows in groups; those that the checkpoint's scheme quantizes
    are linear layers, one expert after the other.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.loop: ExpertLoop | None = None
        self.activate = site.bind(relu2, intermediate_size=spec.intermediate_size)
        self.operands: tuple[Tensor, ...] = ()
        self.bound: dict[str, BoundKernel[..., Tensor]] = {}
        if _is_quantized(site, spec):
            self._add_layers(site, spec)
            return
        self.dispatcher = LocalDispatcher(site, spec)
        held, sizes = spec.num_experts, (spec.hidden_size, spec.intermediate_size)
        for name, inputs, outputs in ((_UP, *sizes), (_DOWN, *sizes[::-1])):
            dims = {"in_features": inputs, "out_features": outputs}
            self.bound[name] = site.bind_kernel(grouped_linear, **dims, num_experts=held)
            matrices = torch.empty(held, outputs, inputs, dtype=site.dtype)
            parameter = nn.Parameter(matrices, requires_grad=False)
            parameter.expert_parts = {name: outputs}  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def _add_layers(self, site: Site, spec: ExpertsSpec) -> None:
        """Add two linear layers for each expert, which the scheme stores as it does."""
        self.loop = ExpertLoop(site, spec, self.activate)
        pairs = []
        for expert in range(spec.num_experts):
            at = site.at(str(expert))
            first = Linear(at.at(_UP), spec.hidden_size, spec.intermediate_size)
            second = Linear(at.at(_DOWN), spec.intermediate_size, spec.hidden_size)
            tell_in_turn(site, first, second)
            self.add_module(str(expert), nn.ModuleList((first, second)))
            pairs.append((first, second))
        self.pairs = tuple(pairs)

    def finalize(self) -> None:
        """Prepare both matrices if their kernels want them so."""
        weights = {name: self.get_parameter(name) for name in self.bound}
        prepared = {
            name: self.bound[name].prepared(weight=w)["weight"] for name, w in weights.items()
        }
        for name, weight in weights.items():
            if prepared[name] is not weight:
                self.register_parameter(name, None)
        self.operands = tuple(prepared.values())

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, L]``, added up by ``weights``."""
        if self.loop is not None:
            return self.loop(x, self.pairs, weights, expert_ids)
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        (up, down), starts = self.operands, starts.long()
        hidden = self.activate(self.bound[_UP].function(rows, up, starts))
        returned = self.bound[_DOWN].function(hidden, down, starts)
        return self.dispatcher.finalize(returned, receipt)


class UngatedMixture(nn.Module):
    """Experts without a gate, chosen by groups, and one that every token visits.

    Args:
        spec: of the experts, as if they read the hidden states.
        shared_size: intermediate size of the one that every token visits.
        latent_size: L; 0 where experts read the hidden states.
        bias: of all projections but those of the experts.
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
        """Return ``[T, H]``."""
        inputs = x if self.into is None else self.into(x)
        mixed: Tensor = self.experts(inputs, *self.router(x))
        return (mixed if self.out is None else self.out(mixed)) + self.shared(x)  # type: ignore[no-any-return]


def _is_quantized(site: Site, spec: ExpertsSpec) -> bool:
    """Say whether the scheme quantizes a matrix of these experts."""
    scheme = site.resolver.scheme
    if scheme is None or scheme.experts_method(site.prefix) is None:
        return False
    return any(
        scheme.linear_method(f"{site.prefix}.{expert}.{name}", (name,)) is not None
        for expert in range(spec.num_experts)
        for name in (_UP, _DOWN)
    )
