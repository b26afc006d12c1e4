"""Routed experts of which each rank holds some, whole.

Dimensions: T tokens, K chosen experts, H hidden size, E experts of all ranks, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from interposer import ExpertsSpec, Ranks, Site
from interposer.errors import ConfigError, InterposerError
from interposer_ops.layers._parameter_cuts import CannotCutError, bare, sandboxed
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.layers.cuts import (
    Cut,
    Ranges,
    Slice,
    Slices,
    even_edges,
    kind_of,
    tell_once,
)
from interposer_ops.layers.divided_linear import (
    MANY_ROWS,
    AllReduce,
    chosen_communicator,
    uncallable,
)
from interposer_ops.layers.expert_placement import ExpertParallel, ExpertPlacement, even_placement
from interposer_ops.layers.experts import Experts, PlainExperts
from interposer_ops.layers.rank_dispatcher import EXCHANGE, ExpertRoutes, RankDispatcher

__all__ = ["PlacedExperts"]

_WAITS = "how many rows go to which rank is read on the host, where tokens are sent to experts"


class PlacedExperts(Experts):
    """The experts of one rank, whole, out of those that the router chooses from.

    For few tokens each rank computes its own experts for all of them, and results are added up. Of
    many tokens each rank takes a share, and sends rows to the ranks of their experts.

    Attributes:
        num_routed: experts of all ranks, E.
        routes: where these are, and how many rows they got.
        dispatch_tokens: from how many tokens on rows are sent; None: never.
    """

    def __init__(
        self,
        site: Site,
        spec: ExpertsSpec,
        placement: ExpertPlacement,
        stacked: frozenset[str],
        dispatch_tokens: int | None,
    ) -> None:
        ranks = _ranks(site)
        held = replace(spec, num_experts=len(placement.ranks[ranks.rank]))
        super().__init__(site, held)
        self.num_routed, self.stacked = spec.num_experts, stacked
        self.routes = ExpertRoutes(placement, ranks.rank)
        self.reduce = AllReduce(site, spec.hidden_size)
        self.dispatch_tokens, self.num_ranks = dispatch_tokens, ranks.size
        self.torch_device = site.resolver.device.torch_device
        if dispatch_tokens is not None:
            rows = max(1, dispatch_tokens // ranks.size)
            self.dispatcher = RankDispatcher(site, held, self.routes, rows)
            width = rows * spec.hidden_size
            _, found = chosen_communicator(site.at(EXCHANGE), "all_gather", width, site.dtype)
            self.gather: Callable[..., Tensor] = uncallable if found is None else found.all_gather

    @property
    def held(self) -> tuple[int, ...]:
        """The experts of this rank, by the numbers that checkpoints and routers have for them."""
        return self.routes.placement.ranks[self.routes.rank]

    @property
    def cut(self) -> Cut:
        """The share of all experts."""
        return Cut("experts", self.num_routed, _ranges(self.held))

    @property
    def slices(self) -> Slices:
        """The share of tensors that hold all experts."""
        one = Slice(0, self.num_routed, _ranges(self.held))
        return {("", name): one for name in self.stacked}

    def finalize(self) -> None:
        """Hand the loaded weights to the method, and hold the tables of routes beside them."""
        super().finalize()
        self.routes.move(self.torch_device)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``.

        All ranks have the same tokens, and get the same bits.
        """
        self.routes.count(expert_ids)
        if self.dispatch_tokens is None or len(x) < self.dispatch_tokens:
            routing = weights, self.routes.own(expert_ids), self.spec.activation
            return self.reduce(self.kernel(x, *self.operands, *routing))  # type: ignore[misc]
        edges = even_edges(self.num_ranks, len(x))
        own = slice(edges[self.routes.rank], edges[self.routes.rank + 1])
        mine = super().forward(x[own], weights[own], expert_ids[own])
        return self.gather(mine, [stop - start for start, stop in pairwise(edges)])


def place_experts(site: Site, spec: ExpertsSpec, settings: ExpertParallel) -> PlacedExperts | None:
    """Return the experts of this rank; None where they cannot be placed whole, which is noted.

    Raises: ConfigError: there are not enough experts for the ranks, or too many are redundant.
    """
    size = _ranks(site).size
    placement = even_placement(spec.num_experts, size, settings.redundant_experts)
    try:
        stacked = _stacked(site, spec, len(placement.ranks[_ranks(site).rank]))
    except (CannotCutError, InterposerError) as refusal:
        tell_once(site, f"experts of {kind_of(site)} are not placed whole: {refusal}")
        return None
    tokens, why = _dispatch_tokens(site, spec, settings)
    layer = PlacedExperts(site, spec, placement, stacked, tokens)
    if tokens is not None and settings.dispatch_tokens is not None:
        annotate_place(site, _WAITS, waits=True)
    held = ", ".join(str(len(own)) for own in placement.ranks)
    annotate_place(
        site,
        f"ranks hold {held} of {spec.num_experts} experts and {settings.redundant_experts} "
        f"redundant ones; {why}",
    )
    return layer


def _dispatch_tokens(
    site: Site, spec: ExpertsSpec, settings: ExpertParallel
) -> tuple[int | None, str]:
    """Return from how many tokens on rows are sent, and why.

    An all-reduce moves 2 (N - 1) / N rows of each token over a rank's links. A token that goes to D
    ranks and back, and then to all of them, moves (2 D / N + 1) (N - 1) / N.
    """
    size, asked = _ranks(site).size, settings.dispatch_tokens
    if asked is not None:
        told = f"tokens are sent to their experts from {asked} of a step on, as asked for"
        return (asked, told) if asked else (None, "results are added up, as asked for")
    reached = size * (1 - (1 - 1 / size) ** spec.top_k)
    rows = f"a token reaches {reached:.2g} of {size} ranks"
    if 2 * reached >= size:
        return None, f"results are added up, which moves least, as {rows}"
    if site.resolver.config.compile != "off":
        return None, "results are added up, as a compiled step cannot read sizes on the host"
    told = f"tokens are sent to their experts from {MANY_ROWS} of a step on, which moves least"
    return MANY_ROWS, f"{told}, as {rows}"


def _stacked(site: Site, spec: ExpertsSpec, count: int) -> frozenset[str]:
    """Return the parameters whose tensors hold all experts, along their first dimension.

    Raises: CannotCutError: this rank cannot hold ``count`` experts as all of them are stored.
    """
    whole, share = (_built(site, replace(spec, num_experts=n)) for n in (spec.num_experts, count))
    further = _built(site, replace(spec, num_experts=spec.num_experts + 1))
    forms = [_form(child) for child in whole.children()]
    others = [_form(child) for child in share.children()]
    if any(form != forms[0] for form in forms) or others != forms[:count]:
        raise CannotCutError(f"{site.prefix}: experts are not stored in one form")
    parameters: Mapping[str, Any] = whole._parameters
    if any(getattr(one, "any_form", False) for one in whole.parameters()):
        raise CannotCutError(f"{site.prefix}: experts are held in whatever form they are stored")
    if parameters.keys() != share._parameters.keys() or parameters.keys() != (
        further._parameters.keys()
    ):
        raise CannotCutError(f"{site.prefix}: some experts are stored in another form")
    found = set()
    for name, parameter in parameters.items():
        if parameter is None or hasattr(parameter, "expert_parts"):
            continue
        shape, more = parameter.shape, further._parameters[name].shape
        if shape == more:
            continue
        if shape[1:] != more[1:] or getattr(parameter, "stored_transposed", False):
            raise CannotCutError(f"{site.prefix}.{name}: experts are not its first dimension")
        found.add(name)
    return frozenset(found)


def _built(site: Site, spec: ExpertsSpec) -> Any:
    """Return a layer with the parameters of such experts, without memory."""
    own = sandboxed(site)
    scheme = own.resolver.scheme
    method = (scheme.experts_method(own.prefix) if scheme else None) or PlainExperts()
    layer = bare(Experts, own)
    with torch.device("meta"):
        method.create_weights(layer, own, spec)
    return layer


def _form(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return the parameters of one expert, as far as others have them alike."""
    return [
        (name, tuple(parameter.shape), parameter.dtype)
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    ]


def _ranges(held: tuple[int, ...]) -> Ranges:
    """Return the ranges of experts, in the order in which they are held."""
    found: list[tuple[int, int]] = []
    for expert in held:
        if found and found[-1][1] == expert:
            found[-1] = found[-1][0], expert + 1
        else:
            found.append((expert, expert + 1))
    return tuple(found)


def _ranks(site: Site) -> Ranks:
    ranks: Any = site.resolver.ranks
    if ranks is None:
        raise ConfigError("experts are placed on ranks, and one process holds all of them")
    return ranks  # type: ignore[no-any-return]
