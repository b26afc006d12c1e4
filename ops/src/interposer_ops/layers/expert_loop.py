"""Experts one after the other, each of them linear layers in the form of the checkpoint's scheme.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import ConfigError
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.layers.expert_stages import GatedActivation, LocalDispatcher, interleaved
from interposer_ops.layers.linear import Linear, MergedLinear

__all__ = [
    "ExpertLoop",
    "JoinedLayers",
    "LinearExperts",
    "Pair",
    "separate_projections",
    "tell_in_turn",
]

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Both projections of an expert, each of rows ``[M, inputs]``."""

_WAITS = (
    "how many rows each expert gets is read on the host, as experts compute one after the other"
)
_IN_TURN = "called for one expert after the other: no op computes all of them in this format"


class ExpertLoop:
    """Sorts the rows of tokens by expert, and calls the projections of each expert that has some.

    It computes what ``fused_experts`` does, with both projections rounded to the dtype of the rows.

    Args:
        activate: what comes between the projections; None takes the activation of ``spec``, which
            has gates.
    """

    def __init__(
        self, site: Site, spec: ExpertsSpec, activate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.dispatcher = LocalDispatcher(site, spec)
        annotate_place(site, _WAITS, waits=True)
        self.activate = activate or _gates_first(GatedActivation(site, spec))

    def __call__(
        self, x: Tensor, experts: Sequence[Pair], weights: Tensor, expert_ids: Tensor, *_: Any
    ) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``."""
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        returned = torch.zeros_like(rows)
        for expert, (start, end) in zip(experts, pairwise(starts.tolist()), strict=True):
            if start < end:
                first, second = expert
                returned[start:end] = second(self.activate(first(rows[start:end])))
        return self.dispatcher.finalize(returned, receipt)


@dataclass(frozen=True, slots=True)
class JoinedLayers:
    """Several projections of one input, the outputs of each behind those of the one before."""

    layers: tuple[Linear, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return ``[M, outputs]`` of ``[M, inputs]``."""
        return torch.cat([layer(rows) for layer in self.layers], -1)


class LinearExperts(ExpertsMethod):
    """Two linear layers for every expert, or three, as the scheme has those of such names.

    So every format of linear layers is one of experts, and every kernel of them serves experts.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Add the linear layers to ``layer``.

        Gates and what they act on are one product, unless these would have to agree on numbers:
        calibration finds others where a mixture has no layer that shares their input.

        Raises: ConfigError: matrices are stored together, or have biases.
        """
        gate, up, down = separate_projections(site, spec)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.loop, pairs = ExpertLoop(site, spec), []
        for expert in range(spec.num_experts):
            at = site.at(str(expert))
            whole, second = at.at("gate_up_proj"), Linear(at.at(down), inner, hidden)
            first: Callable[[Tensor], Tensor]
            method = site.resolver.scheme.linear_method(whole.prefix, (gate, up))
            if method is not None and method.parts_agree:
                apart = tuple(Linear(at.at(name), hidden, inner) for name in (gate, up))
                layers, first = (*apart, second), JoinedLayers(apart)
            else:
                first = MergedLinear(whole, hidden, {gate: inner, up: inner})
                layers = first, second
            tell_in_turn(site, *layers)
            layer.add_module(str(expert), nn.ModuleList(layers))
            pairs.append((first, second))
        self.pairs = tuple(pairs)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the loop and the linear layers, which are finalized by themselves."""
        return self.loop, (self.pairs,)


def separate_projections(site: Site, spec: ExpertsSpec) -> tuple[str, str, str]:
    """Return what checkpoints call the matrices of an expert, gates first.

    Raises: ConfigError: they are stored together, or have biases.
    """
    if spec.projections is None or spec.biased or spec.alternating or spec.inputs_first:
        raise ConfigError(
            f"{site.prefix}: experts are read in this format where each matrix is stored by itself "
            "and has no bias. Try: leave the experts plain"
        )
    return spec.projections


def tell_in_turn(site: Site, *layers: Linear) -> None:
    """Say of the kernels of these layers of experts, which were just built, how they are called."""
    for layer in layers:
        annotate_place(replace(site, prefix=layer.prefix), _IN_TURN)


def _gates_first(activate: GatedActivation) -> Callable[[Tensor], Tensor]:
    """Return the activation of rows ``[M, 2 I]`` whose gates come first."""
    if not activate.interleaves:
        return activate
    return lambda projected: activate(interleaved(projected))
