"""Routed experts under tensor parallelism: each rank computes a shard of every expert.

``PlacedExperts`` is the alternative (expert parallelism): each rank holds some whole experts. The
router is replicated in both.

Dimensions: T tokens, H hidden size, E experts, I intermediate size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer.errors import InterposerError
from interposer_ops.layers._parameter_slices import (
    CannotShardError,
    empty_layer,
    probe_site,
    slices_between,
)
from interposer_ops.layers.cuts import Cut, Slice, Slices, alone, even_cut, note_replicated
from interposer_ops.layers.divided_linear import AllReduce
from interposer_ops.layers.experts import Experts, PlainExperts
from interposer_ops.layers.placed_experts import place_experts

__all__ = ["share_experts"]

_FIRST = "gate_up"
_LAST_BIAS = "down_proj_bias"


class DividedExperts(Experts):
    """Experts of which this rank holds a shard along I; an all-reduce sums partial results."""

    def __init__(self, site: Site, spec: ExpertsSpec, cut: Cut, slices: Slices) -> None:
        super().__init__(site, replace(spec, intermediate_size=cut.size))
        self.cut, self.slices = cut, slices
        self.reduce = AllReduce(site, spec.hidden_size)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute the weighted sum ``[T, H]`` of the chosen experts' outputs."""
        return self.reduce(super().forward(x, weights, expert_ids))


def share_experts(site: Site, spec: ExpertsSpec) -> Experts:
    """Build the experts at ``site``: expert parallel, tensor parallel or replicated.

    Expert parallelism is tried if the settings of the ranks request it; then a shard along I, if
    the scheme stores the weights so that a rank can read its part; else the experts are replicated.

    Raises: ConfigError: there are fewer experts than ranks, or too many redundant experts.
    """
    ranks: Any = site.resolver.ranks
    if not alone(site) and ranks.experts is not None:
        placed = place_experts(site, spec, ranks.experts)
        if placed is not None:
            return placed
    cut = even_cut(site, "expert", spec.intermediate_size)
    if cut is not None:
        try:
            return DividedExperts(site, spec, cut, _slices(site, spec, cut))
        except (CannotShardError, InterposerError) as refusal:
            note_replicated(site, str(refusal))
    return Experts(site, spec)


def _slices(site: Site, spec: ExpertsSpec, cut: Cut) -> Slices:
    """Return the slices that this rank reads of each stored matrix."""
    ranks: Any = site.resolver.ranks
    separators: dict[str, tuple[str, str]] = {}

    def build_parameters(size: int) -> dict[str, nn.Parameter]:
        probe = probe_site(site)
        scheme = probe.resolver.scheme
        method = (scheme.experts_method(probe.prefix) if scheme else None) or PlainExperts()
        layer = empty_layer(Experts, probe)
        method.create_weights(layer, probe, replace(spec, intermediate_size=size))
        if layer._modules:
            raise CannotShardError(f"{site.prefix}: experts are separate layers in this format")
        parameters_by_key = {}
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            parts = getattr(parameter, "expert_parts", None)
            for part, rows in (parts or {"": 0}).items():
                # slices_between wants one string per parameter; ``separators`` splits it again.
                key = f"{part}/{name}"
                separators[key] = part, name
                parameters_by_key[key] = _matrix(parameter, rows) if parts else parameter
        return parameters_by_key

    slices = {}
    for key, shard in slices_between(site.prefix, build_parameters, cut, ranks.size).items():
        part, name = separators[key]
        is_joined = not part and name.startswith(_FIRST) and not spec.alternating
        slices[part, name] = _halves(shard) if is_joined else shard
    if spec.biased and ranks.rank:
        # Partial results are summed, so only rank 0 may add the bias of the last projection.
        slices["", _LAST_BIAS] = Slice(0, spec.num_experts, ((0, spec.num_experts),), None, True)
    return slices


def _matrix(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    """Return a meta parameter like one matrix of one expert, stored by itself."""
    matrix = nn.Parameter(
        torch.empty(rows, *parameter.shape[2:], dtype=parameter.dtype, device="meta"), False
    )
    matrix.__dict__.update(parameter.__dict__)
    return matrix


def _halves(joined: Slice) -> Slice:
    """Return the slice of a tensor that stores all gates, then all up projections."""
    # The ranges were found for the joined dimension of 2 I, so a rank's gates are half of each.
    half = joined.whole // 2
    ranges = [(start // 2, stop // 2) for start, stop in joined.ranges]
    up_ranges = [(start + half, stop + half) for start, stop in ranges]
    return replace(joined, ranges=(*ranges, *up_ranges))
