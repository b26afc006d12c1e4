"""Pairs of projections of a layer: the first one is cut by outputs, the last one by inputs.

What lies between them is computed on a share of its heads, or of its elements, by every rank.
Where one process computes all, or one of the pair cannot be cut, both are the standard layers.

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
    slices_of_heads,
    tell_replicated,
)
from interposer_ops.layers.divided_linear import ColumnLinear, Projection, RowLinear, divides
from interposer_ops.layers.linear import Linear, MergedLinear

__all__ = ["QKV", "PairNames", "share_heads", "share_inner"]

Outputs = Mapping[str, Sequence[tuple[str, int]]]
"""The axes of the outputs of each part, with how many times its size."""

QKV: Outputs = {
    "q_proj": (("query", 1),),
    "k_proj": (("kv", 1),),
    "v_proj": (("kv", 1),),
}
"""Queries are of all heads, keys and values of the kv heads, each of D elements."""


class PairNames(NamedTuple):
    """The names of both projections below a layer, and whether they have biases."""

    first: str
    last: str
    first_bias: bool = False
    last_bias: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Both projections, each of which is built when the layer wants it.

    Attributes:
        slices: of both; None where they are whole.
    """

    site: Site
    projections: tuple[Projection, Projection]
    slices: tuple[Slices, ...] | None

    def first(self) -> Linear:
        """Return the first one."""
        return self._built(0)

    def last(self) -> Linear:
        """Return the last one."""
        return self._built(1)

    def _built(self, index: int) -> Linear:
        projection = self.projections[index]
        at = self.site.at(projection.name)
        if self.slices is None:
            return projection.whole(at)
        kind = RowLinear if index else ColumnLinear
        return kind(at, projection, self.slices[index])


@dataclass(frozen=True, slots=True)
class HeadShares(Pair):
    """The projections of an attention and what this rank computes between them.

    Attributes:
        spec: of the heads that this rank has.
        sizes: of its queries, keys and values in the result of the first one.
        heads: cuts of query and of kv heads; None where this rank has all.
    """

    spec: AttentionSpec
    sizes: tuple[int, ...]
    heads: tuple[Cut, Cut] | None

    def attention(self, site: Site) -> Attention:
        """Return the attention of these heads."""
        attention = Attention(site, self.spec)
        if self.heads is not None:
            query, kv = self.heads
            slices = dict(slices_of_heads(["sinks"], query))
            if self.spec.head_scales:
                slices |= slices_of_heads(["k_scale", "v_scale"], kv)
            attention.slices = slices  # type: ignore[assignment]
        return attention


@dataclass(frozen=True, slots=True)
class InnerShares(Pair):
    """The projections of an MLP, and the size between them on this rank."""

    size: int


def share_heads(
    site: Site,
    spec: AttentionSpec,
    hidden_size: int,
    names: PairNames,
    outputs: Outputs = QKV,
    kind: type[Linear] = MergedLinear,
    undivided: str = "",
) -> HeadShares:
    """Return the projections of an attention at ``site``, cut by heads if they can be.

    Args:
        hidden_size: H, inputs of the first one and outputs of the last one.
        outputs: in the manner of ``QKV``, of each part of the first one.
        kind: the standard class of both, ``MergedLinear`` for that and ``Linear``.
        undivided: why heads cannot be shared out; empty where they can.
    """
    size = spec.head_size
    whole = {"query": spec.num_heads * size, "kv": spec.num_kv_heads * size}
    shares = None if undivided else heads_cut(site, spec)
    if undivided and not alone(site):
        tell_replicated(site, undivided)
    if shares is not None:
        local, query, kv = shares
        cuts = {"query": query.times(size), "kv": kv.times(size)}
        pair = _projections(names, hidden_size, outputs, whole, "query", kind, cuts)
        if (slices := divides(site, *pair)) is not None:
            held = {name: cut.size for name, cut in cuts.items()}
            return HeadShares(site, pair, slices, local, _sizes(outputs, held), (query, kv))
    pair = _projections(names, hidden_size, outputs, whole, "query", kind)
    return HeadShares(site, pair, None, spec, _sizes(outputs, whole), None)


def share_inner(
    site: Site,
    hidden_size: int,
    inner_size: int,
    names: PairNames,
    outputs: Mapping[str, int],
    kind: type[Linear] = MergedLinear,
) -> InnerShares:
    """Return the projections of an MLP at ``site``, cut by elements between them if they can be.

    Args:
        inner_size: I, inputs of the last one.
        outputs: how many times I each part of the first one has.
        kind: the standard class of both, ``MergedLinear`` for that and ``Linear``.
    """
    counted = {name: (("inner", 1),) * count for name, count in outputs.items()}
    whole, cut = {"inner": inner_size}, even_cut(site, "column", inner_size)
    if cut is not None:
        pair = _projections(names, hidden_size, counted, whole, "inner", kind, {"inner": cut})
        if (slices := divides(site, *pair)) is not None:
            return InnerShares(site, pair, slices, cut.size)
    pair = _projections(names, hidden_size, counted, whole, "inner", kind)
    return InnerShares(site, pair, None, inner_size)


def _projections(
    names: PairNames,
    hidden_size: int,
    outputs: Outputs,
    whole: Mapping[str, int],
    inner: str,
    kind: type[Linear],
    cuts: Mapping[str, Cut] | None = None,
) -> tuple[Projection, Projection]:
    """Return both projections, cut or not.

    Args:
        whole: size of each axis of the outputs.
        inner: the axis that the last one reads.
        cuts: of each axis.
    """
    parts = {
        name: sum(whole[axis] * count for axis, count in axes) for name, axes in outputs.items()
    }
    columns = row = None
    if cuts is not None:
        columns = _cut_outputs(outputs, cuts)
        row = Cut("row", cuts[inner].whole, cuts[inner].ranges)
    last = {names.last.rpartition(".")[2]: hidden_size}
    second = Linear if kind is MergedLinear else kind
    return (
        Projection(names.first, hidden_size, parts, names.first_bias, columns=columns, kind=kind),
        Projection(names.last, whole[inner], last, names.last_bias, row=row, kind=second),
    )


def _cut_outputs(outputs: Outputs, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Return the cut of each part, whose outputs may be of several axes one behind the other."""
    found = {}
    for name, axes in outputs.items():
        ranges: list[tuple[int, int]] = []
        offset = 0
        for axis, count in axes:
            cut = cuts[axis].times(count)
            ranges += [(start + offset, stop + offset) for start, stop in cut.ranges]
            offset += cut.whole
        found[name] = Cut(cuts[axes[0][0]].kind, offset, tuple(ranges))
    return found


def _sizes(outputs: Outputs, held: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(held[axis] * count for axes in outputs.values() for axis, count in axes)
