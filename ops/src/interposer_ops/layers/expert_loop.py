"""Experts one after the other, each of them linear layers in the form of the checkpoint's scheme.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import ConfigError
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.layers.expert_stages import GatedActivation, LocalDispatcher, interleaved
from interposer_ops.layers.linear import Linear, MergedLinear

__all__ = ["ExpertLoop", "LinearExperts", "Pair", "separate_projections", "tell_in_turn"]

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
        scheme = site.resolver.scheme
        self.loop, pairs = ExpertLoop(site, spec), []
        for expert in range(spec.num_experts):
            at = site.at(str(expert))
            first, parts = at.at("gate_up_proj"), {gate: inner, up: inner}
            method = scheme.linear_method(first.prefix, tuple(parts)) if scheme else None
            if method is not None and method.parts_agree:
                projections = [Linear(at.at(name), hidden, inner) for name in parts]
            else:
                projections = [MergedLinear(first, hidden, parts)]
            second = Linear(at.at(down), inner, hidden)
            tell_in_turn(site, *projections, second)
            layer.add_module(str(expert), nn.ModuleList((*projections, second)))
            pairs.append((joined(projections), second))
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


def joined(layers: Sequence[Linear]) -> Callable[[Tensor], Tensor]:
    """Return what computes the outputs of several layers, one behind the other."""
    if len(layers) == 1:
        return layers[0]
    return lambda rows: torch.cat([layer(rows) for layer in layers], -1)


def tell_in_turn(site: Site, *layers: Linear) -> None:
    """Say of the kernels of these layers of experts, which were just built, how they are called."""
    for layer in layers:
        annotate_place(replace(site, prefix=layer.prefix), _IN_TURN)


def _gates_first(activate: GatedActivation) -> Callable[[Tensor], Tensor]:
    """Return the activation of rows ``[M, 2 I]`` whose gates come first."""
    if not activate.interleaves:
        return activate
    return lambda projected: activate(interleaved(projected))
