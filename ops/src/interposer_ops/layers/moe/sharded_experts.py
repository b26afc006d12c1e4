"""Routed experts over several ranks: expert parallel or tensor parallel.

Expert parallel: each rank holds some experts, whole. Tensor parallel: each rank holds a shard of
every expert along I. The router is replicated in both.

Dimensions: T tokens, K chosen experts, H hidden size, I intermediate size, E experts of all ranks,
N ranks.
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
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.layers.moe.dispatcher import EXCHANGE, AllToAllDispatcher, ExpertRoutes
from interposer_ops.layers.moe.experts import Experts, PlainExperts
from interposer_ops.layers.moe.placement import ExpertParallel, ExpertPlacement, even_placement
from interposer_ops.layers.tensor_parallel.collectives import (
    MANY_ROWS,
    AllReduce,
    choose_communicator,
    uncallable,
)
from interposer_ops.layers.tensor_parallel.sharding import (
    CannotShardError,
    Ranges,
    Shard,
    Slice,
    Slices,
    empty_layer,
    even_edges,
    is_single_process,
    note_once,
    note_replicated,
    prefix_without_numbers,
    probe_site,
    shard_evenly,
    slices_between,
)

__all__ = ["ExpertParallelExperts", "TensorParallelExperts", "shard_experts"]

_FIRST = "gate_up"
_LAST_BIAS = "down_proj_bias"
_WAITS = "the host reads the number of rows for each rank, where tokens are sent to experts"


class ExpertParallelExperts(Experts):
    """Experts under expert parallelism: this rank holds some experts completely.

    In small steps each rank computes its own experts for all tokens, and an all-reduce sums the
    results. In large steps each rank takes a part of the tokens and sends rows to the ranks of the
    chosen experts (all-to-all).

    Attributes:
        num_routed: E, experts of all ranks.
        routes: location and row count of every expert.
        dispatch_tokens: smallest number of tokens for the all-to-all; None: never.
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
        local_spec = replace(spec, num_experts=len(placement.ranks[ranks.rank]))
        super().__init__(site, local_spec)
        self.num_routed, self.stacked = spec.num_experts, stacked
        self.routes = ExpertRoutes(placement, ranks.rank)
        self.reduce = AllReduce(site, spec.hidden_size)
        self.dispatch_tokens, self.num_ranks = dispatch_tokens, ranks.size
        self.torch_device = site.resolver.device.torch_device
        if dispatch_tokens is not None:
            rows = max(1, dispatch_tokens // ranks.size)
            self.dispatcher = AllToAllDispatcher(site, local_spec, self.routes, rows)
            width = rows * spec.hidden_size
            _, chosen = choose_communicator(site.at(EXCHANGE), "all_gather", width, site.dtype)
            self.gather: Callable[..., Tensor] = uncallable if chosen is None else chosen.all_gather

    @property
    def local_expert_ids(self) -> tuple[int, ...]:
        """Ids of this rank's experts, in the numbering of checkpoints and routers."""
        return self.routes.placement.ranks[self.routes.rank]

    @property
    def shard(self) -> Shard:
        """This rank's shard of all experts."""
        return Shard("experts", self.num_routed, _ranges(self.local_expert_ids))

    @property
    def slices(self) -> Slices:
        """This rank's slices of tensors that store all experts."""
        shard = Slice(0, self.num_routed, _ranges(self.local_expert_ids))
        return {("", name): shard for name in self.stacked}

    def finalize(self) -> None:
        """Prepare the loaded weights, and move the routing tables to the device."""
        super().finalize()
        self.routes.move_to(self.torch_device)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute the weighted sum ``[T, H]`` of the chosen experts' outputs for ``x`` ``[T, H]``.

        All ranks pass the same tokens and get bit-identical results.
        """
        # Counted before the tokens are divided, so that all ranks have the same counts.
        self.routes.count(expert_ids)
        if self.dispatch_tokens is None or len(x) < self.dispatch_tokens:
            routing = weights, self.routes.local_indices(expert_ids), self.spec.activation
            return self.reduce(self.kernel(x, *self.operands, *routing))  # type: ignore[misc]
        edges = even_edges(self.num_ranks, len(x))
        local = slice(edges[self.routes.rank], edges[self.routes.rank + 1])
        local_results = super().forward(x[local], weights[local], expert_ids[local])
        return self.gather(local_results, [stop - start for start, stop in pairwise(edges)])


class NotPlacedNote(str):
    """Note that explains why a layer's experts cannot use expert parallelism."""

    __slots__ = ()


def build_expert_parallel(
    site: Site, spec: ExpertsSpec, settings: ExpertParallel
) -> ExpertParallelExperts | None:
    """Build this rank's experts under expert parallelism; None, with a note, if impossible.

    Raises: ConfigError: there are fewer experts than ranks, or too many redundant experts.
    """
    size = _ranks(site).size
    placement = even_placement(spec.num_experts, size, settings.redundant_experts)
    try:
        stacked = _stacked_parameters(site, spec, len(placement.ranks[_ranks(site).rank]))
    except (CannotShardError, InterposerError) as refusal:
        prefix = prefix_without_numbers(site)
        note_once(site, NotPlacedNote(f"experts of {prefix} are not placed whole: {refusal}"))
        return None
    tokens, why = _dispatch_tokens(site, spec, settings)
    layer = ExpertParallelExperts(site, spec, placement, stacked, tokens)
    if tokens is not None and settings.dispatch_tokens is not None:
        annotate_place(site, _WAITS, waits=True)
    counts = ", ".join(str(len(experts)) for experts in placement.ranks)
    annotate_place(
        site,
        f"ranks hold {counts} of {spec.num_experts} experts and {settings.redundant_experts} "
        f"redundant ones; {why}",
    )
    return layer


def _dispatch_tokens(
    site: Site, spec: ExpertsSpec, settings: ExpertParallel
) -> tuple[int | None, str]:
    """Return the number of tokens from which steps use the all-to-all, and the reason as text.

    Traffic per token, in rows over one rank's links: an all-reduce moves 2 (N - 1) / N. Sending a
    token to the D ranks of its experts and back, then gathering the result on all ranks, moves (2 D
    / N + 1) (N - 1) / N.
    """
    size, requested = _ranks(site).size, settings.dispatch_tokens
    if requested is not None:
        reason = f"tokens are sent to their experts from {requested} of a step on, as requested"
        return (requested, reason) if requested else (None, "results are added up, as requested")
    # D: expected number of distinct ranks among top_k experts that are uniform over the ranks.
    reached = size * (1 - (1 - 1 / size) ** spec.top_k)
    rows = f"a token reaches {reached:.2g} of {size} ranks"
    if 2 * reached >= size:
        return None, f"results are added up, which moves least, as {rows}"
    if site.resolver.config.compile != "off":
        return None, "results are added up, as a compiled step cannot read sizes on the host"
    reason = f"tokens are sent to their experts from {MANY_ROWS} of a step on, which moves least"
    return MANY_ROWS, f"{reason}, as {rows}"


def _stacked_parameters(site: Site, spec: ExpertsSpec, count: int) -> frozenset[str]:
    """Return the names of parameters that store all experts along the first dimension.

    The layer is built on the meta device with E, E + 1 and ``count`` experts, and shapes are
    compared.

    Raises: CannotShardError: a rank cannot read ``count`` experts from tensors stored like this.
    """
    complete, shard = (
        _meta_layer(site, replace(spec, num_experts=n)) for n in (spec.num_experts, count)
    )
    # A tensor stores all experts if one more expert makes its first dimension longer.
    larger = _meta_layer(site, replace(spec, num_experts=spec.num_experts + 1))
    forms = [_parameter_shapes(child) for child in complete.children()]
    shard_forms = [_parameter_shapes(child) for child in shard.children()]
    if any(form != forms[0] for form in forms) or shard_forms != forms[:count]:
        raise CannotShardError(f"{site.prefix}: experts are not stored in one form")
    parameters: Mapping[str, Any] = complete._parameters
    if any(getattr(parameter, "any_form", False) for parameter in complete.parameters()):
        raise CannotShardError(
            f"{site.prefix}: the form of stored experts is known only after loading"
        )
    if parameters.keys() != shard._parameters.keys() or parameters.keys() != (
        larger._parameters.keys()
    ):
        raise CannotShardError(f"{site.prefix}: some experts are stored in another form")
    stacked = set()
    for name, parameter in parameters.items():
        if parameter is None or hasattr(parameter, "expert_parts"):
            continue  # stored as one tensor per matrix, so the rank reads whole tensors
        shape, larger_shape = parameter.shape, larger._parameters[name].shape
        if shape == larger_shape:
            continue  # independent of the number of experts, so replicated
        if shape[1:] != larger_shape[1:] or getattr(parameter, "stored_transposed", False):
            raise CannotShardError(f"{site.prefix}.{name}: experts are not its first dimension")
        stacked.add(name)
    return frozenset(stacked)


def _meta_layer(site: Site, spec: ExpertsSpec) -> Any:
    """Return a layer with the experts' parameters, on the meta device."""
    probe = probe_site(site)
    scheme = probe.resolver.scheme
    method = (scheme.experts_method(probe.prefix) if scheme else None) or PlainExperts()
    layer = empty_layer(Experts, probe)
    with torch.device("meta"):
        method.create_weights(layer, probe, spec)
    return layer


def _parameter_shapes(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return names, shapes and dtypes of one expert's parameters, for comparison."""
    return [
        (name, tuple(parameter.shape), parameter.dtype)
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    ]


def _ranges(experts: tuple[int, ...]) -> Ranges:
    """Merge consecutive expert ids into half-open ranges, in storage order."""
    ranges: list[tuple[int, int]] = []
    for expert in experts:
        if ranges and ranges[-1][1] == expert:
            ranges[-1] = ranges[-1][0], expert + 1
        else:
            ranges.append((expert, expert + 1))
    return tuple(ranges)


def _ranks(site: Site) -> Ranks:
    ranks: Any = site.resolver.ranks
    if ranks is None:
        raise ConfigError("experts are placed on ranks, and one process holds all of them")
    return ranks  # type: ignore[no-any-return]


class TensorParallelExperts(Experts):
    """Experts of which this rank holds a shard along I; an all-reduce sums partial results."""

    def __init__(self, site: Site, spec: ExpertsSpec, shard: Shard, slices: Slices) -> None:
        super().__init__(site, replace(spec, intermediate_size=shard.size))
        self.shard, self.slices = shard, slices
        self.reduce = AllReduce(site, spec.hidden_size)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute the weighted sum ``[T, H]`` of the chosen experts' outputs."""
        return self.reduce(super().forward(x, weights, expert_ids))


def shard_experts(site: Site, spec: ExpertsSpec) -> Experts:
    """Build the experts at ``site``: expert parallel, tensor parallel or replicated.

    Expert parallelism is tried if the settings of the ranks request it; then a shard along I, if
    the storage of the weights allows a rank to read a shard; else the experts are replicated.

    Raises: ConfigError: there are fewer experts than ranks, or too many redundant experts.
    """
    ranks: Any = site.resolver.ranks
    if not is_single_process(site) and ranks.experts is not None:
        experts = build_expert_parallel(site, spec, ranks.experts)
        if experts is not None:
            return experts
    shard = shard_evenly(site, "expert", spec.intermediate_size)
    if shard is not None:
        try:
            return TensorParallelExperts(site, spec, shard, _slices(site, spec, shard))
        except (CannotShardError, InterposerError) as refusal:
            note_replicated(site, str(refusal))
    return Experts(site, spec)


def _slices(site: Site, spec: ExpertsSpec, shard: Shard) -> Slices:
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
    for key, piece in slices_between(site.prefix, build_parameters, shard, ranks.size).items():
        part, name = separators[key]
        is_joined = not part and name.startswith(_FIRST) and not spec.alternating
        slices[part, name] = _halves(piece) if is_joined else piece
    if spec.biased and ranks.rank:
        # Partial results are summed, so only rank 0 may add the bias of the last projection.
        slices["", _LAST_BIAS] = Slice(0, spec.num_experts, ((0, spec.num_experts),), None, True)
    return slices


def _matrix(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    """Return a meta parameter for one matrix of one expert, as if it were stored alone."""
    matrix = nn.Parameter(
        torch.empty(rows, *parameter.shape[2:], dtype=parameter.dtype, device="meta"), False
    )
    matrix.__dict__.update(parameter.__dict__)
    return matrix


def _halves(joined: Slice) -> Slice:
    """Return this rank's slice of a tensor that stores all gates first, then all up rows."""
    # The ranges were found for the joined dimension of 2 I, so a rank's gates are half of each.
    half = joined.whole // 2
    ranges = [(start // 2, stop // 2) for start, stop in joined.ranges]
    up_ranges = [(start + half, stop + half) for start, stop in ranges]
    return replace(joined, ranges=(*ranges, *up_ranges))
