"""Experts computed one after the other, each as linear layers in the checkpoint's format.

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
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.moe.dispatcher import LocalDispatcher
from interposer_ops.layers.moe.experts import ExpertActivation, interleaved

__all__ = [
    "ConcatenatedLayers",
    "ExpertLoop",
    "ExpertProjections",
    "LinearExperts",
    "note_sequential",
    "separate_projections",
]

ExpertProjections = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""First and last projection of one expert; each maps rows ``[M, inputs]`` to ``[M, outputs]``."""

_WAITS = "the host reads the number of rows of each expert, because experts run one after the other"
_SEQUENTIAL = "called for one expert after the other: no op computes all of them in this format"


class ExpertLoop:
    """Sort the tokens' rows by expert, then call the projections of each expert that has rows.

    Unlike in ``fused_experts``, both projections round to the dtype of the rows.

    Args:
        activate: activation between the projections; None: the gated activation of ``spec``.
    """

    def __init__(
        self, site: Site, spec: ExpertsSpec, activate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.dispatcher = LocalDispatcher(site, spec)
        annotate_place(site, _WAITS, waits=True)
        self.activate = activate or _gates_first(ExpertActivation(site, spec))

    def __call__(
        self,
        x: Tensor,
        experts: Sequence[ExpertProjections],
        weights: Tensor,
        expert_ids: Tensor,
        *_: Any,
    ) -> Tensor:
        """Compute the weighted sum ``[T, H]`` of the chosen experts' outputs."""
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        results = torch.zeros_like(rows)
        # tolist() waits for the device: the row counts decide which experts run.
        for expert, (start, end) in zip(experts, pairwise(starts.tolist()), strict=True):
            if start < end:  # an expert without rows is not called
                first, second = expert
                results[start:end] = second(self.activate(first(rows[start:end])))
        return self.dispatcher.finalize(results, receipt)


@dataclass(frozen=True, slots=True)
class ConcatenatedLayers:
    """Several linear layers that share one input; their outputs are concatenated."""

    layers: tuple[Linear, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply all layers to ``[M, inputs]``; return their outputs joined, ``[M, outputs]``."""
        return torch.cat([layer(rows) for layer in self.layers], -1)


class LinearExperts(ExpertsMethod):
    """Experts method that builds two or three linear layers per expert.

    Every quantization format and kernel of linear layers thereby works for experts, too.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Add the linear layers of every expert to ``layer``.

        Gate and up projections form one merged layer, unless the format demands that merged parts
        share numbers such as an input scale: calibration of a MoE layer may give the two
        projections different numbers.

        Raises: ConfigError: the checkpoint stores the matrices of all experts together, or with
            biases.
        """
        gate, up, down = separate_projections(site, spec)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.loop, pairs = ExpertLoop(site, spec), []
        for expert in range(spec.num_experts):
            expert_site = site.at(str(expert))
            merged_site = expert_site.at("gate_up_proj")
            second = Linear(expert_site.at(down), inner, hidden)
            first: Callable[[Tensor], Tensor]
            method = site.resolver.scheme.linear_method(merged_site.prefix, (gate, up))
            if method is not None and method.parts_agree:
                separate = tuple(Linear(expert_site.at(name), hidden, inner) for name in (gate, up))
                layers, first = (*separate, second), ConcatenatedLayers(separate)
            else:
                first = MergedLinear(merged_site, hidden, {gate: inner, up: inner})
                layers = first, second
            note_sequential(site, *layers)
            layer.add_module(str(expert), nn.ModuleList(layers))
            pairs.append((first, second))
        self.pairs = tuple(pairs)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the loop and the linear layers; each linear layer finalizes itself."""
        return self.loop, (self.pairs,)


def separate_projections(site: Site, spec: ExpertsSpec) -> tuple[str, str, str]:
    """Return the checkpoint names of an expert's gate, up and down matrices.

    Raises: ConfigError: the checkpoint stores the matrices together, or with biases.
    """
    if spec.projections is None or spec.biased or spec.alternating or spec.inputs_first:
        raise ConfigError(
            f"{site.prefix}: experts are read in this format where each matrix is stored by itself "
            "and has no bias. Try: leave the experts plain"
        )
    return spec.projections


def note_sequential(site: Site, *layers: Linear) -> None:
    """Note in the kernel choices of these layers that experts run one after the other."""
    for layer in layers:
        annotate_place(replace(site, prefix=layer.prefix), _SEQUENTIAL)


def _gates_first(activate: ExpertActivation) -> Callable[[Tensor], Tensor]:
    """Wrap an activation so that the first half of its rows ``[M, 2 I]`` is the gates."""
    if not activate.interleaves:
        return activate
    return lambda projected: activate(interleaved(projected))
