"""Pairs of tensor-parallel projections: the first sharded by outputs, the last by inputs.

Every rank computes the layers between the two projections on its shard of the heads or of the
intermediate elements. Both projections are standard layers if one process computes the model or if
one of the two cannot be sharded.

Dimensions: H hidden size, D head size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interposer import AttentionSpec, Site
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.cuts import (
    Cut,
    Slices,
    alone,
    even_cut,
    heads_cut,
    note_replicated,
    slices_of_heads,
)
from interposer_ops.layers.divided_linear import ColumnLinear, Projection, RowLinear, divides
from interposer_ops.layers.linear import Linear, MergedLinear

__all__ = ["QKV", "PairNames", "share_heads", "share_inner"]

Outputs = Mapping[str, Sequence[tuple[str, int]]]
"""For each part, its output axes in order: (axis name, multiple of the axis size)."""

QKV: Outputs = {
    "q_proj": (("query", 1),),
    "k_proj": (("kv", 1),),
    "v_proj": (("kv", 1),),
}
"""Q has D outputs for each query head; K and V have D outputs for each kv head."""


class PairNames(NamedTuple):
    """The names of both projections below a layer, and whether each has a bias."""

    first: str
    last: str
    first_bias: bool = False
    last_bias: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Both projections; each is built when the enclosing layer calls for it.

    Attributes:
        slices: slices of both projections; None if both are replicated.
    """

    site: Site
    projections: tuple[Projection, Projection]
    slices: tuple[Slices, ...] | None

    def first(self) -> Linear:
        """Build the first projection."""
        return self._build(0)

    def last(self) -> Linear:
        """Build the last projection."""
        return self._build(1)

    def _build(self, index: int) -> Linear:
        projection = self.projections[index]
        at = self.site.at(projection.name)
        if self.slices is None:
            return projection.whole(at)
        kind = RowLinear if index else ColumnLinear
        return kind(at, projection, self.slices[index])


@dataclass(frozen=True, slots=True)
class HeadShards(Pair):
    """The projections of an attention layer, and the shard of heads between them.

    Attributes:
        spec: attention spec of this rank's heads.
        sizes: sizes of queries, keys and values in the first projection's result.
        heads: shards of query and kv heads; None if this rank has all heads.
    """

    spec: AttentionSpec
    sizes: tuple[int, ...]
    heads: tuple[Cut, Cut] | None

    def attention(self, site: Site) -> Attention:
        """Build the attention layer of this rank's heads."""
        attention = Attention(site, self.spec)
        if self.heads is not None:
            query, kv = self.heads
            slices = dict(slices_of_heads(["sinks"], query))
            if self.spec.head_scales:
                slices |= slices_of_heads(["k_scale", "v_scale"], kv)
            attention.slices = slices  # type: ignore[assignment]
        return attention


@dataclass(frozen=True, slots=True)
class InnerShards(Pair):
    """The projections of an MLP, and the intermediate size on this rank."""

    size: int


def share_heads(
    site: Site,
    spec: AttentionSpec,
    hidden_size: int,
    names: PairNames,
    outputs: Outputs = QKV,
    kind: type[Linear] = MergedLinear,
    undivided: str = "",
) -> HeadShards:
    """Build the projections of an attention layer at ``site``, sharded by heads if possible.

    Args:
        hidden_size: H, inputs of the first projection and outputs of the last one.
        outputs: output axes of the first projection's parts, like ``QKV``.
        kind: standard class of both projections; ``MergedLinear`` means ``MergedLinear`` for the
            first projection and ``Linear`` for the last.
        undivided: why the heads cannot be sharded; empty if the heads can.
    """
    size = spec.head_size
    axis_sizes = {"query": spec.num_heads * size, "kv": spec.num_kv_heads * size}
    head_shards = None if undivided else heads_cut(site, spec)
    if undivided and not alone(site):
        note_replicated(site, undivided)
    if head_shards is not None:
        local, query, kv = head_shards
        cuts = {"query": query.times(size), "kv": kv.times(size)}
        pair = _projections(names, hidden_size, outputs, axis_sizes, "query", kind, cuts)
        # A quantization format may still forbid the shard, for instance by its block size.
        if (slices := divides(site, *pair)) is not None:
            local_sizes = {name: cut.size for name, cut in cuts.items()}
            return HeadShards(site, pair, slices, local, _sizes(outputs, local_sizes), (query, kv))
    pair = _projections(names, hidden_size, outputs, axis_sizes, "query", kind)
    return HeadShards(site, pair, None, spec, _sizes(outputs, axis_sizes), None)


def share_inner(
    site: Site,
    hidden_size: int,
    inner_size: int,
    names: PairNames,
    outputs: Mapping[str, int],
    kind: type[Linear] = MergedLinear,
) -> InnerShards:
    """Build the projections of an MLP at ``site``, sharded along I if possible.

    Args:
        inner_size: I, inputs of the last projection.
        outputs: for each part of the first projection, its outputs as a multiple of I.
        kind: standard class of both projections; ``MergedLinear`` means ``MergedLinear`` for the
            first projection and ``Linear`` for the last.
    """
    axes_by_part = {name: (("inner", 1),) * count for name, count in outputs.items()}
    axis_sizes, cut = {"inner": inner_size}, even_cut(site, "column", inner_size)
    if cut is not None:
        # Both projections are sharded, or neither: the layers between need matching sizes.
        pair = _projections(
            names, hidden_size, axes_by_part, axis_sizes, "inner", kind, {"inner": cut}
        )
        if (slices := divides(site, *pair)) is not None:
            return InnerShards(site, pair, slices, cut.size)
    pair = _projections(names, hidden_size, axes_by_part, axis_sizes, "inner", kind)
    return InnerShards(site, pair, None, inner_size)


def _projections(
    names: PairNames,
    hidden_size: int,
    outputs: Outputs,
    axis_sizes: Mapping[str, int],
    inner: str,
    kind: type[Linear],
    cuts: Mapping[str, Cut] | None = None,
) -> tuple[Projection, Projection]:
    """Describe both projections, sharded if ``cuts`` is given.

    Args:
        whole: size of each axis of the outputs.
        inner: the axis that the last projection reads.
        cuts: shard of each axis.
    """
    parts = {
        name: sum(axis_sizes[axis] * count for axis, count in axes)
        for name, axes in outputs.items()
    }
    columns = row = None
    if cuts is not None:
        columns = _cut_outputs(outputs, cuts)
        row = Cut("row", cuts[inner].whole, cuts[inner].ranges)
    last = {names.last.rpartition(".")[2]: hidden_size}
    second = Linear if kind is MergedLinear else kind
    return (
        Projection(names.first, hidden_size, parts, names.first_bias, columns=columns, kind=kind),
        Projection(names.last, axis_sizes[inner], last, names.last_bias, row=row, kind=second),
    )


def _cut_outputs(outputs: Outputs, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Return the shard of each part, whose outputs may be several concatenated axes."""
    cuts_by_part = {}
    for name, axes in outputs.items():
        ranges: list[tuple[int, int]] = []
        offset = 0
        for axis, count in axes:
            cut = cuts[axis].times(count)
            ranges += [(start + offset, stop + offset) for start, stop in cut.ranges]
            offset += cut.whole
        cuts_by_part[name] = Cut(cuts[axes[0][0]].kind, offset, tuple(ranges))
    return cuts_by_part


def _sizes(outputs: Outputs, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis_sizes[axis] * count for axes in outputs.values() for axis, count in axes)
