"""Linear layers of which each rank holds a share, and the collectives that add them up.

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
from interposer_ops.layers._parameter_cuts import (
    CannotCutError,
    bare,
    parameters_of,
    sandboxed,
    slices_between,
)
from interposer_ops.layers.cuts import Cut, Slice, Slices, alone, tell_replicated
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear

__all__ = ["AllReduce", "ColumnLinear", "Projection", "RowLinear", "divides"]

_FEW_ROWS = 64
MANY_ROWS = 1024
"""Rows of a step that is a prompt's; no step has so many sequences."""

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of some other layer, with the cut of its outputs or of its inputs.

    Attributes:
        name: below the layer that it is a part of.
        parts: sizes of outputs by the names that checkpoints use.
        columns: cuts of the outputs of each part; None where all outputs are held.
        row: cut of the inputs; None where all inputs are held.
        kind: the standard class of it.
    """

    name: str
    in_features: int
    parts: Mapping[str, int]
    bias: bool
    columns: Mapping[str, Cut] | None = None
    row: Cut | None = None
    kind: type[Linear] = Linear

    def whole(self, site: Site) -> Linear:
        """Return all of the projection at its own site."""
        if issubclass(self.kind, MergedLinear):
            return self.kind(site, self.in_features, self.parts, self.bias)
        return self.kind(site, self.in_features, sum(self.parts.values()), self.bias)

    def slices(self, site: Site) -> Slices:
        """Return what this rank reads of the parameters of the projection at its own site.

        Raises: CannotCutError: a parameter cannot be cut so.
        """
        if self.row is not None:
            return self._row_slices(site, self.row)
        assert self.columns is not None
        ranks = _count(site)
        found: dict[tuple[str, str], Slice] = {}
        for part, cut in self.columns.items():
            place = f"{site.prefix.rpartition('.')[0]}.{part}"
            slices = slices_between(
                place,
                lambda size, part=part: self._built(site, self.in_features, {part: size}),  # type: ignore[misc]
                cut,
                ranks,
            )
            found.update({(part, name): one for name, one in slices.items()})
        self._check(site, self.in_features, {name: c.size for name, c in self.columns.items()})
        return found

    def _row_slices(self, site: Site, cut: Cut) -> Slices:
        ranks = site.resolver.ranks
        assert ranks is not None
        (part,) = self.parts
        slices = slices_between(
            site.prefix,
            lambda size: self._built(site, size, self.parts, bias=False),
            cut,
            ranks.size,
        )
        self._check(site, cut.size, self.parts)
        return {(part, name): one for name, one in slices.items()}

    def _check(self, site: Site, inputs: int, parts: Mapping[str, int]) -> None:
        """Raise CannotCutError if nothing can hold the share."""
        try:
            self._built(site, inputs, parts)
        except InterposerError as error:
            raise CannotCutError(f"{site.prefix}: {error}") from error

    def _built(
        self, site: Site, inputs: int, parts: Mapping[str, int], bias: bool | None = None
    ) -> dict[str, Any]:
        """Return the parameters of a layer with these sizes."""
        own = sandboxed(site)
        scheme = own.resolver.scheme
        layer = bare(Linear, own, in_features=inputs, parts=dict(parts))
        method = scheme.linear_method(own.prefix, tuple(self.parts)) if scheme else None
        method = method or PlainLinear()
        wanted = self.bias if bias is None else bias
        method.create_weights(layer, own, inputs, sum(parts.values()), wanted)
        return parameters_of(layer)


class ColumnLinear(MergedLinear):
    """A share of the outputs of one projection, or of several of one input."""

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.columns is not None
        self.cuts = dict(projection.columns)
        self.slices = slices
        parts = {name: cut.size for name, cut in self.cuts.items()}
        self._create(site, projection.in_features, parts, projection.bias)
        projection.kind.mark(self)


class RowLinear(Linear):
    """A share of the inputs of one projection, whose results are added up over the ranks.

    The first rank alone has the bias.
    """

    def __init__(self, site: Site, projection: Projection, slices: Slices) -> None:
        PluggableLayer.__init__(self, site)
        assert projection.row is not None
        assert site.resolver.ranks is not None
        self.cut = projection.row
        self.slices = slices
        is_first = site.resolver.ranks.rank == 0
        self._create(site, self.cut.size, projection.parts, projection.bias and is_first)
        projection.kind.mark(self)
        self.elsewhere = ("bias",) if projection.bias and not is_first else ()
        self.reduce_alone = AllReduce(site, sum(projection.parts.values()))
        self.left: tuple[Any, ...] = ()  # the LeftSum, once a norm takes it
        self.summand = _Summand(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of the whole input: ``[..., I]`` of this rank to ``[..., O]``."""
        return self.reduce(self.summand(x))

    def reduce(self, summand: Tensor) -> Tensor:
        """Return the sum over the ranks; where a norm takes it, the summand as it is."""
        if self.left and self.left[0].is_left():
            return summand
        return self.reduce_alone(summand)


class _Summand(nn.Module):
    """The result of one rank before results are added up, for hooks that change it."""

    def __init__(self, layer: RowLinear) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, so that it is no module of its own

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., O]`` of the inputs of this rank."""
        (layer,) = self._layer
        return layer.kernel(x, *layer.operands)  # type: ignore[misc]


def divides(site: Site, *projections: Projection) -> tuple[Slices, ...] | None:
    """Return the slices of projections below ``site`` if all of them can be cut.

    None: there is one process; or one of them cannot be cut, which is noted: all are replicated.
    """
    if alone(site):
        return None
    found = []
    for projection in projections:
        try:
            found.append(projection.slices(site.at(projection.name)))
        except CannotCutError as refusal:
            tell_replicated(site, str(refusal))
            return None
    return tuple(found)


def _count(site: Site) -> int:
    ranks = site.resolver.ranks
    assert ranks is not None
    return ranks.size


class AllReduce:
    """Adds ``[T, width]`` up over the ranks; its argument may be overwritten.

    What is best for the rows of a decode step need not be so for those of a prompt, so that one
    communicator is chosen for each, which may be the same. Where ranks are only described nothing
    can be called.

    Attributes:
        communicators, choices, num_bytes: for few rows and for many.
        limit: how many elements are few.
    """

    def __init__(self, site: Site, width: int, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or site.dtype
        sizes = width, MANY_ROWS * width
        self.num_bytes = tuple(size * self.dtype.itemsize for size in sizes)
        found = [chosen_communicator(site, "all_reduce", size, self.dtype) for size in sizes]
        self.choices: tuple[Choice, ...] = tuple(choice for choice, _ in found)
        self.communicators: tuple[Any, ...] = tuple(communicator for _, communicator in found)
        self.limit = _FEW_ROWS * width
        calls = [c.all_reduce if c is not None else uncallable for c in self.communicators]
        self._few, self._many = calls

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of ``x``."""
        return self._few(x) if x.numel() <= self.limit else self._many(x)


def bind_all_gather(site: Site, sizes: Sequence[int]) -> Reduce:
    """Return what puts ``[T, sizes[rank]]`` of all ranks side by side, ``[T, sum(sizes)]``."""
    ranks = site.resolver.ranks
    assert ranks is not None
    _, found = chosen_communicator(site, "all_gather", sizes[ranks.rank], site.dtype)
    if found is None:
        return uncallable
    communicator = found

    def gather(x: Tensor) -> Tensor:
        return communicator.all_gather(x.mT.contiguous(), sizes).mT.contiguous()

    return gather


def chosen_communicator(
    site: Site, collective: str, size: int, dtype: torch.dtype
) -> tuple[Choice, Communicator | None]:
    """Return what is chosen for ``size`` elements of a rank; None where ranks are described."""
    num_bytes = size * dtype.itemsize
    return site.resolver.communicator(collective, dtype, num_bytes, site.prefix)


def uncallable(*_: object) -> Tensor:
    """Raise, in place of a collective."""
    raise RuntimeError("the ranks are only described, so that they cannot exchange anything")
