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
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.tensor_parallel.linear import (
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    shard_projections,
)
from interposer_ops.layers.tensor_parallel.sharding import (
    Shard,
    Slices,
    head_slices,
    is_single_process,
    note_replicated,
    shard_evenly,
    shard_heads,
)

__all__ = ["QKV", "ProjectionNames", "shard_attention", "shard_mlp"]

Outputs = Mapping[str, Sequence[tuple[str, int]]]
"""For each part, its output axes in order: (axis name, multiple of the axis size)."""

QKV: Outputs = {
    "q_proj": (("query", 1),),
    "k_proj": (("kv", 1),),
    "v_proj": (("kv", 1),),
}
"""Q has D outputs for each query head; K and V have D outputs for each kv head."""


class ProjectionNames(NamedTuple):
    """The names of both projections below a layer, and whether each has a bias."""

    first: str
    last: str
    first_bias: bool = False
    last_bias: bool = False


@dataclass(frozen=True, slots=True)
class ProjectionPair:
    """First and last projection of a layer, each built when the enclosing layer requests it.

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
        kind = RowParallelLinear if index else ColumnParallelLinear
        return kind(at, projection, self.slices[index])


@dataclass(frozen=True, slots=True)
class AttentionProjections(ProjectionPair):
    """The projections of an attention layer, and the shard of heads between them.

    Attributes:
        spec: attention spec of this rank's heads.
        sizes: sizes of queries, keys and values in the first projection's result.
        heads: shards of query and kv heads; None if this rank has all heads.
    """

    spec: AttentionSpec
    sizes: tuple[int, ...]
    heads: tuple[Shard, Shard] | None

    def attention(self, site: Site) -> Attention:
        """Build the attention layer of this rank's heads."""
        attention = Attention(site, self.spec)
        if self.heads is not None:
            query, kv = self.heads
            slices = dict(head_slices(["sinks"], query))
            if self.spec.head_scales:
                slices |= head_slices(["k_scale", "v_scale"], kv)
            attention.slices = slices  # type: ignore[assignment]
        return attention


@dataclass(frozen=True, slots=True)
class MLPProjections(ProjectionPair):
    """The projections of an MLP, and the intermediate size on this rank."""

    size: int


def shard_attention(
    site: Site,
    spec: AttentionSpec,
    hidden_size: int,
    names: ProjectionNames,
    outputs: Outputs = QKV,
    kind: type[Linear] = MergedLinear,
    undivided: str = "",
) -> AttentionProjections:
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
    head_shards = None if undivided else shard_heads(site, spec)
    if undivided and not is_single_process(site):
        note_replicated(site, undivided)
    if head_shards is not None:
        local, query, kv = head_shards
        shards = {"query": query.times(size), "kv": kv.times(size)}
        pair = _projections(names, hidden_size, outputs, axis_sizes, "query", kind, shards)
        # A quantization format may still forbid the shard, for instance by its block size.
        if (slices := shard_projections(site, *pair)) is not None:
            local_sizes = {name: shard.size for name, shard in shards.items()}
            return AttentionProjections(
                site, pair, slices, local, _sizes(outputs, local_sizes), (query, kv)
            )
    pair = _projections(names, hidden_size, outputs, axis_sizes, "query", kind)
    return AttentionProjections(site, pair, None, spec, _sizes(outputs, axis_sizes), None)


def shard_mlp(
    site: Site,
    hidden_size: int,
    inner_size: int,
    names: ProjectionNames,
    outputs: Mapping[str, int],
    kind: type[Linear] = MergedLinear,
) -> MLPProjections:
    """Build the projections of an MLP at ``site``, sharded along I if possible.

    Args:
        inner_size: I, inputs of the last projection.
        outputs: for each part of the first projection, its outputs as a multiple of I.
        kind: standard class of both projections; ``MergedLinear`` means ``MergedLinear`` for the
            first projection and ``Linear`` for the last.
    """
    axes_by_part = {name: (("inner", 1),) * count for name, count in outputs.items()}
    axis_sizes, shard = {"inner": inner_size}, shard_evenly(site, "column", inner_size)
    if shard is not None:
        # Both projections are sharded, or neither: the layers between need matching sizes.
        pair = _projections(
            names, hidden_size, axes_by_part, axis_sizes, "inner", kind, {"inner": shard}
        )
        if (slices := shard_projections(site, *pair)) is not None:
            return MLPProjections(site, pair, slices, shard.size)
    pair = _projections(names, hidden_size, axes_by_part, axis_sizes, "inner", kind)
    return MLPProjections(site, pair, None, inner_size)


def _projections(
    names: ProjectionNames,
    hidden_size: int,
    outputs: Outputs,
    axis_sizes: Mapping[str, int],
    inner: str,
    kind: type[Linear],
    shards: Mapping[str, Shard] | None = None,
) -> tuple[Projection, Projection]:
    """Describe both projections, sharded if ``shards`` is given.

    Args:
        axis_sizes: size of each axis of the outputs, over all ranks.
        inner: the axis that the last projection reads.
        shards: shard of each axis.
    """
    parts = {
        name: sum(axis_sizes[axis] * count for axis, count in axes)
        for name, axes in outputs.items()
    }
    columns = row = None
    if shards is not None:
        columns = _shard_outputs(outputs, shards)
        row = Shard("row", shards[inner].whole, shards[inner].ranges)
    last = {names.last.rpartition(".")[2]: hidden_size}
    second = Linear if kind is MergedLinear else kind
    return (
        Projection(names.first, hidden_size, parts, names.first_bias, columns=columns, kind=kind),
        Projection(names.last, axis_sizes[inner], last, names.last_bias, row=row, kind=second),
    )


def _shard_outputs(outputs: Outputs, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return this rank's shard of each part; a part may consist of several concatenated axes."""
    shards_by_part = {}
    for name, axes in outputs.items():
        ranges: list[tuple[int, int]] = []
        offset = 0
        for axis, count in axes:
            shard = shards[axis].times(count)
            ranges += [(start + offset, stop + offset) for start, stop in shard.ranges]
            offset += shard.whole
        shards_by_part[name] = Shard(shards[axes[0][0]].kind, offset, tuple(ranges))
    return shards_by_part


def _sizes(outputs: Outputs, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis_sizes[axis] * count for axes in outputs.values() for axis, count in axes)
