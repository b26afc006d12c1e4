"""Tensor-parallel linear layers: each rank holds a shard; collectives combine the results.

Dimensions: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer.errors import InterposerError
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear
from interposer_ops.layers.tensor_parallel.collectives import AllReduce
from interposer_ops.layers.tensor_parallel.sharding import (
    CannotShardError,
    Shard,
    Slice,
    Slices,
    empty_layer,
    is_single_process,
    note_replicated,
    parameters_of,
    probe_site,
    slices_between,
)

__all__ = ["ColumnParallelLinear", "Projection", "RowParallelLinear", "shard_projections"]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer inside another layer, sharded by outputs or by inputs.

    Attributes:
        name: name below the enclosing layer.
        parts: output sizes by the names that checkpoints use.
        columns: shard of each part's outputs; None if all outputs are on this rank.
        row: shard of the inputs; None if all inputs are on this rank.
        kind: the standard class of the layer.
    """

    name: str
    in_features: int
    parts: Mapping[str, int]
    bias: bool
    columns: Mapping[str, Shard] | None = None
    row: Shard | None = None
    kind: type[Linear] = Linear

    def whole(self, site: Site) -> Linear:
        """Build the layer replicated on every rank, with all inputs and outputs."""
        if issubclass(self.kind, MergedLinear):
            return self.kind(site, self.in_features, self.parts, self.bias)
        return self.kind(site, self.in_features, sum(self.parts.values()), self.bias)

    def slices(self, site: Site) -> Slices:
        """Return the slices that this rank reads of the layer's parameters.

        Raises: CannotShardError: a parameter cannot be sharded like this.
        """
        if self.row is not None:
            return self._row_slices(site, self.row)
        assert self.columns is not None
        ranks = _count(site)
        slices_by_parameter: dict[tuple[str, str], Slice] = {}
        for part, shard in self.columns.items():
            part_prefix = f"{site.prefix.rpartition('.')[0]}.{part}"
            slices = slices_between(
                part_prefix,
                lambda size, part=part: self._build_parameters(  # type: ignore[misc]
                    site, self.in_features, {part: size}
                ),
                shard,
                ranks,
            )
            slices_by_parameter.update({(part, name): piece for name, piece in slices.items()})
        self._check(site, self.in_features, {name: c.size for name, c in self.columns.items()})
        return slices_by_parameter

    def _row_slices(self, site: Site, shard: Shard) -> Slices:
        ranks = site.resolver.ranks
        assert ranks is not None
        (part,) = self.parts
        # Probed without the bias, which belongs to the outputs and is not sharded.
        slices = slices_between(
            site.prefix,
            lambda size: self._build_parameters(site, size, self.parts, bias=False),
            shard,
            ranks.size,
        )
        self._check(site, shard.size, self.parts)
        return {(part, name): piece for name, piece in slices.items()}

    def _check(self, site: Site, inputs: int, parts: Mapping[str, int]) -> None:
        """Raise CannotShardError if the quantization method cannot build the shard."""
        try:
            self._build_parameters(site, inputs, parts)
        except InterposerError as error:
            raise CannotShardError(f"{site.prefix}: {error}") from error

    def _build_parameters(
        self, site: Site, inputs: int, parts: Mapping[str, int], bias: bool | None = None
    ) -> dict[str, Any]:
        """Build a throw-away layer with the given sizes, and return the layer's parameters."""
        probe = probe_site(site)
        scheme = probe.resolver.scheme
        layer = empty_layer(Linear, probe, in_features=inputs, parts=dict(parts))
        method = scheme.linear_method(probe.prefix, tuple(self.parts)) if scheme else None
        method = method or PlainLinear()
        has_bias = self.bias if bias is None else bias
        method.create_weights(layer, probe, inputs, sum(parts.values()), has_bias)
        return parameters_of(layer)


class ColumnParallelLinear(MergedLinear):
    """Column-parallel linear layer: a shard of the outputs of one or several merged projections."""

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.columns is not None
        self.shards = dict(projection.columns)
        self.slices = slices
        parts = {name: shard.size for name, shard in self.shards.items()}
        self._create(site, projection.in_features, parts, projection.bias)
        projection.kind.mark(self)


class RowParallelLinear(Linear):
    """Row-parallel linear layer: a shard of the inputs; partial results are summed over the ranks.

    Only rank 0 holds the bias, so the sum contains the bias once.
    """

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.row is not None
        assert site.resolver.ranks is not None
        self.shard = projection.row
        self.slices = slices
        # The all-reduce would add a bias once per rank.
        is_first = site.resolver.ranks.rank == 0
        self._create(site, self.shard.size, projection.parts, projection.bias and is_first)
        projection.kind.mark(self)
        self.elsewhere = ("bias",) if projection.bias and not is_first else ()
        self.all_reduce = AllReduce(site, sum(projection.parts.values()))
        # Set once the next norm does the all-reduce.
        self.fused_all_reduce: tuple[Any, ...] = ()
        self.summand = _Summand(self)

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's inputs ``[..., I]``, and sum ``[..., O]`` over the ranks."""
        return self.reduce(self.summand(x))

    def reduce(self, summand: Tensor) -> Tensor:
        """Sum over the ranks; return the summand unchanged if the next norm does the sum."""
        if self.fused_all_reduce and self.fused_all_reduce[0].is_fused():
            return summand
        return self.all_reduce(summand)


class _Summand(nn.Module):
    """The partial result of one rank before the all-reduce, as a module for forward hooks."""

    def __init__(self, layer: RowParallelLinear) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple hides the module from torch's child modules

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's inputs to partial outputs ``[..., O]``."""
        (layer,) = self._layer
        return layer.kernel(x, *layer.operands)  # type: ignore[misc]


def shard_projections(site: Site, *projections: Projection) -> tuple[Slices, ...] | None:
    """Return the slices of all ``projections`` below ``site``, if each of them can be sharded.

    Returns: None if there is one process, or if a projection cannot be sharded; all projections are
        then replicated, and a note says why.
    """
    if is_single_process(site):
        return None
    slices = []
    for projection in projections:
        try:
            slices.append(projection.slices(site.at(projection.name)))
        except CannotShardError as refusal:
            note_replicated(site, str(refusal))
            return None
    return tuple(slices)


def _count(site: Site) -> int:
    ranks = site.resolver.ranks
    assert ranks is not None
    return ranks.size
