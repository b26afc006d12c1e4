"""Routed experts of which each rank computes a share of the elements inside every expert.

``PlacedExperts`` are whole ones, of which each rank has some; both leave the router whole.

Dimensions: T tokens, E experts, I intermediate size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer.errors import InterposerError
from interposer_ops.layers._parameter_cuts import (
    CannotCutError,
    bare,
    sandboxed,
    slices_between,
)
from interposer_ops.layers.cuts import Cut, Slice, Slices, alone, even_cut, tell_replicated
from interposer_ops.layers.divided_linear import AllReduce
from interposer_ops.layers.experts import Experts, PlainExperts
from interposer_ops.layers.placed_experts import place_experts

__all__ = ["share_experts"]

_FIRST = "gate_up"
_LAST_BIAS = "down_proj_bias"


class DividedExperts(Experts):
    """A share of each expert; what all shares return is added up over the ranks."""

    def __init__(self, site: Site, spec: ExpertsSpec, cut: Cut, slices: Slices) -> None:
        super().__init__(site, replace(spec, intermediate_size=cut.size))
        self.cut, self.slices = cut, slices
        self.reduce = AllReduce(site, spec.hidden_size)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``."""
        return self.reduce(super().forward(x, weights, expert_ids))


def share_experts(site: Site, spec: ExpertsSpec) -> Experts:
    """Return the experts at ``site``, as far as the scheme stores them so that ranks share them.

    They are placed whole where the ranks say how; else, or where they cannot be, cut by I.

    Raises: ConfigError: there are not enough of them to be placed.
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
        except (CannotCutError, InterposerError) as refusal:
            tell_replicated(site, str(refusal))
    return Experts(site, spec)


def _slices(site: Site, spec: ExpertsSpec, cut: Cut) -> Slices:
    """Return what this rank reads of each matrix, or of all of them where they are one tensor."""
    ranks: Any = site.resolver.ranks
    separators: dict[str, tuple[str, str]] = {}

    def built(size: int) -> dict[str, nn.Parameter]:
        own = sandboxed(site)
        scheme = own.resolver.scheme
        method = (scheme.experts_method(own.prefix) if scheme else None) or PlainExperts()
        layer = bare(Experts, own)
        method.create_weights(layer, own, replace(spec, intermediate_size=size))
        if layer._modules:
            raise CannotCutError(f"{site.prefix}: each expert is layers of its own in this format")
        found = {}
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            parts = getattr(parameter, "expert_parts", None)
            for part, rows in (parts or {"": 0}).items():
                key = f"{part}/{name}"
                separators[key] = part, name
                found[key] = _matrix(parameter, rows) if parts else parameter
        return found

    found = {}
    for key, one in slices_between(site.prefix, built, cut, ranks.size).items():
        part, name = separators[key]
        is_joined = not part and name.startswith(_FIRST) and not spec.alternating
        found[part, name] = _halves(one) if is_joined else one
    if spec.biased and ranks.rank:
        found["", _LAST_BIAS] = Slice(0, spec.num_experts, ((0, spec.num_experts),), None, True)
    return found


def _matrix(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    """Return a parameter like one matrix of one expert, as it is stored by itself."""
    own = nn.Parameter(
        torch.empty(rows, *parameter.shape[2:], dtype=parameter.dtype, device="meta"), False
    )
    own.__dict__.update(parameter.__dict__)
    return own


def _halves(one: Slice) -> Slice:
    """Return the slice of gates, and behind them that of what they act on."""
    half = one.whole // 2
    ranges = [(start // 2, stop // 2) for start, stop in one.ranges]
    behind = [(start + half, stop + half) for start, stop in ranges]
    return replace(one, ranges=(*ranges, *behind))
