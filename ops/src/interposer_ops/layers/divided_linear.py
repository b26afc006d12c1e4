"""Tensor-parallel linear layers: each rank holds a shard; collectives combine the results.

Dimensions: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Choice, Communicator, PluggableLayer, Site
from interposer.errors import InterposerError
from interposer_ops.layers._parameter_slices import (
    CannotShardError,
    empty_layer,
    parameters_of,
    probe_site,
    slices_between,
)
from interposer_ops.layers.cuts import Cut, Slice, Slices, alone, note_replicated
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear

__all__ = ["AllReduce", "ColumnLinear", "Projection", "RowLinear", "divides"]

_FEW_ROWS = 64
MANY_ROWS = 1024
"""Typical rows of a prefill step. Decode steps have fewer rows, one per sequence."""

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer inside another layer, with the shard of its outputs or of its inputs.

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
    columns: Mapping[str, Cut] | None = None
    row: Cut | None = None
    kind: type[Linear] = Linear

    def whole(self, site: Site) -> Linear:
        """Build the replicated layer at its own site."""
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
        for part, cut in self.columns.items():
            part_prefix = f"{site.prefix.rpartition('.')[0]}.{part}"
            slices = slices_between(
                part_prefix,
                lambda size, part=part: self._build_parameters(  # type: ignore[misc]
                    site, self.in_features, {part: size}
                ),
                cut,
                ranks,
            )
            slices_by_parameter.update({(part, name): shard for name, shard in slices.items()})
        self._check(site, self.in_features, {name: c.size for name, c in self.columns.items()})
        return slices_by_parameter

    def _row_slices(self, site: Site, cut: Cut) -> Slices:
        ranks = site.resolver.ranks
        assert ranks is not None
        (part,) = self.parts
        # Probed without the bias, which belongs to the outputs and is not sharded.
        slices = slices_between(
            site.prefix,
            lambda size: self._build_parameters(site, size, self.parts, bias=False),
            cut,
            ranks.size,
        )
        self._check(site, cut.size, self.parts)
        return {(part, name): shard for name, shard in slices.items()}

    def _check(self, site: Site, inputs: int, parts: Mapping[str, int]) -> None:
        """Raise CannotShardError if no quantization method can build the shard."""
        try:
            self._build_parameters(site, inputs, parts)
        except InterposerError as error:
            raise CannotShardError(f"{site.prefix}: {error}") from error

    def _build_parameters(
        self, site: Site, inputs: int, parts: Mapping[str, int], bias: bool | None = None
    ) -> dict[str, Any]:
        """Build a throw-away layer with these sizes, and return its parameters."""
        probe = probe_site(site)
        scheme = probe.resolver.scheme
        layer = empty_layer(Linear, probe, in_features=inputs, parts=dict(parts))
        method = scheme.linear_method(probe.prefix, tuple(self.parts)) if scheme else None
        method = method or PlainLinear()
        has_bias = self.bias if bias is None else bias
        method.create_weights(layer, probe, inputs, sum(parts.values()), has_bias)
        return parameters_of(layer)


class ColumnLinear(MergedLinear):
    """Column-parallel linear layer: a shard of the outputs of one or several merged projections."""

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.columns is not None
        self.cuts = dict(projection.columns)
        self.slices = slices
        parts = {name: cut.size for name, cut in self.cuts.items()}
        self._create(site, projection.in_features, parts, projection.bias)
        projection.kind.mark(self)


class RowLinear(Linear):
    """Row-parallel linear layer: a shard of the inputs; partial results are summed over the ranks.

    Only rank 0 holds the bias, so the sum contains the bias once.
    """

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.row is not None
        assert site.resolver.ranks is not None
        self.cut = projection.row
        self.slices = slices
        # The all-reduce would add a bias once per rank.
        is_first = site.resolver.ranks.rank == 0
        self._create(site, self.cut.size, projection.parts, projection.bias and is_first)
        projection.kind.mark(self)
        self.elsewhere = ("bias",) if projection.bias and not is_first else ()
        self.reduce_alone = AllReduce(site, sum(projection.parts.values()))
        self.left: tuple[Any, ...] = ()  # the LeftSum, once the next norm does the all-reduce
        self.summand = _Summand(self)

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's inputs ``[..., I]``, and sum ``[..., O]`` over the ranks."""
        return self.reduce(self.summand(x))

    def reduce(self, summand: Tensor) -> Tensor:
        """Sum over the ranks; return the summand unchanged if the next norm does the sum."""
        if self.left and self.left[0].is_left():
            return summand
        return self.reduce_alone(summand)


class _Summand(nn.Module):
    """The partial result of one rank before the all-reduce, as a module for forward hooks."""

    def __init__(self, layer: RowLinear) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple hides the module from torch's child modules

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's inputs to ``[..., O]``."""
        (layer,) = self._layer
        return layer.kernel(x, *layer.operands)  # type: ignore[misc]


def divides(site: Site, *projections: Projection) -> tuple[Slices, ...] | None:
    """Return the slices of all ``projections`` below ``site``, if each of them can be sharded.

    Returns: None if there is one process, or if a projection cannot be sharded; all projections are
        then replicated, and a note says why.
    """
    if alone(site):
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


class AllReduce:
    """Sum ``[T, width]`` over the ranks; the argument may be overwritten.

    The fastest communicator for a decode step may not be the fastest for a prefill step, so one is
    chosen for each size; both may be the same. If the ranks are only described (a plan without
    processes), the object exists but cannot be called.

    Attributes:
        communicators, choices, num_bytes: one for few rows, one for many rows.
        limit: largest number of elements that count as few rows.
    """

    def __init__(self, site: Site, width: int, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or site.dtype
        # Communicators are chosen by message size: one row (decode) and a prompt's rows (prefill).
        sizes = width, MANY_ROWS * width
        self.num_bytes = tuple(size * self.dtype.itemsize for size in sizes)
        chosen = [chosen_communicator(site, "all_reduce", size, self.dtype) for size in sizes]
        self.choices: tuple[Choice, ...] = tuple(choice for choice, _ in chosen)
        self.communicators: tuple[Any, ...] = tuple(communicator for _, communicator in chosen)
        self.limit = _FEW_ROWS * width
        calls = [c.all_reduce if c is not None else uncallable for c in self.communicators]
        self._reduce_few, self._reduce_many = calls

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks."""
        return self._reduce_few(x) if x.numel() <= self.limit else self._reduce_many(x)


def bind_all_gather(site: Site, sizes: Sequence[int]) -> Reduce:
    """Return a function that concatenates the ranks' columns.

    The function maps ``[T, sizes[rank]]`` of each rank to ``[T, sum(sizes)]``.
    """
    ranks = site.resolver.ranks
    assert ranks is not None
    _, chosen = chosen_communicator(site, "all_gather", sizes[ranks.rank], site.dtype)
    if chosen is None:
        return uncallable
    communicator = chosen

    def gather(x: Tensor) -> Tensor:
        # ``all_gather`` concatenates rows, so the columns are gathered as rows of the transpose.
        return communicator.all_gather(x.mT.contiguous(), sizes).mT.contiguous()

    return gather


def chosen_communicator(
    site: Site, collective: str, size: int, dtype: torch.dtype
) -> tuple[Choice, Communicator | None]:
    """Choose a communicator for messages of ``size`` elements per rank.

    Returns: the choice and its communicator; None as communicator if the ranks are only described.
    """
    num_bytes = size * dtype.itemsize
    return site.resolver.communicator(collective, dtype, num_bytes, site.prefix)


def uncallable(*_: object) -> Tensor:
    """Raise; stands in for a collective of ranks that are only described."""
    raise RuntimeError("the ranks are only described, so that they cannot exchange anything")
