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

__all__ = ["ExpertLoop", "LinearExperts", "Pair", "tell_in_turn"]

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
    """Two linear layers for every expert, as the scheme has them for those of such names.

    So every format of linear layers is one of experts, and every kernel of them serves experts.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Add the linear layers to ``layer``; gates and what they act on are one.

        Raises: ConfigError: matrices are stored together, or have biases.
        """
        if spec.projections is None or spec.biased or spec.alternating or spec.inputs_first:
            raise ConfigError(
                f"{site.prefix}: experts are read in this format where each matrix is stored by "
                "itself and has no bias. Try: leave the experts plain"
            )
        gate, up, down = spec.projections
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.loop, pairs = ExpertLoop(site, spec), []
        for expert in range(spec.num_experts):
            at = site.at(str(expert))
            first = MergedLinear(at.at("gate_up_proj"), hidden, {gate: inner, up: inner})
            second = Linear(at.at(down), inner, hidden)
            tell_in_turn(site, first, second)
            layer.add_module(str(expert), nn.ModuleList((first, second)))
            pairs.append((first, second))
        self.pairs = tuple(pairs)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the loop and the linear layers, which are finalized by themselves."""
        return self.loop, (self.pairs,)


def tell_in_turn(site: Site, *layers: Linear) -> None:
    """Say of the kernels of these layers of experts, which were just built, how they are called."""
    for layer in layers:
        annotate_place(replace(site, prefix=layer.prefix), _IN_TURN)


def _gates_first(activate: GatedActivation) -> Callable[[Tensor], Tensor]:
    """Return the activation of rows ``[M, 2 I]`` whose gates come first."""
    if not activate.interleaves:
        return activate
    return lambda projected: activate(interleaved(projected))
