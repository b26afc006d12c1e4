"""All cases of an op, enumerated without building one of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, cast

import torch

from interposer import Case, CustomOp
from interposer.errors import RecordError
from interposer_testing.cases._axis import DENSE, ORDINARY, Axis, Point
from interposer_testing.cases._layout import MEANINGS, Strides, laid_out, layouts_of
from interposer_testing.cases._special import SPECIALS, Special, with_special

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Builder = Callable[[Point, torch.dtype, torch.Generator], Case]

Variation = Literal["absent", "dtype", "rank"]
"""A property of an argument: whether it is None, its dtype, how many dimensions it has."""

_VARIATIONS: Mapping[Variation, str] = {
    "absent": "may be None",
    "dtype": "in each dtype that the op names",
    "rank": "in each number of dimensions that the op names",
}


class CaseSpace:
    """A case generator whose cases are the points of a space.

    Points are every combination of the axes, with dense memory and ordinary numbers; and, at the
    labels of ``crossed``, every combination with one layout or one special value besides.

    Attributes:
        axes: what the op's own cases differ in.
        dtypes: that the op has cases of.
        strided: what the op takes of the memory of its arguments.
        varying: what else differs between calls that a request does not tell apart, by argument.
    """

    def __init__(
        self,
        build: Builder,
        *axes: Axis,
        dtypes: Sequence[torch.dtype] = FLOATS,
        strided: Mapping[str, Strides] | None = None,
        varying: Mapping[str, Sequence[Variation]] | None = None,
        special: Mapping[str, Sequence[Special]] | None = None,
        crossed: Mapping[str, Sequence[str]] | None = None,
        alone: Mapping[str, Sequence[str]] | None = None,
        valid: Callable[[Point, torch.dtype], bool] | None = None,
    ) -> None:
        """Describe the space.

        Args:
            build: makes the case of a point, dense and of ordinary numbers; its label is ignored.
            strided: what the op takes of the memory of its arguments; dense where it is silent.
            varying: properties that no dim states and that every kernel has to take, by argument.
            special: special values that the op defines results for, by argument.
            crossed: by axis, the labels at which layouts and specials are tried; all of an axis
                that is not named. Cases there must not be empty.
            alone: by axis, the labels that are tried only with the first label of every other
                axis: what is empty differs in nothing else.
            valid: says which points exist for a dtype; all without it.

        Raises: RecordError: ``crossed`` or ``alone`` names an axis or a label that is not there.
        """
        self.axes = axes
        self.dtypes = tuple(dtypes)
        self._build = build
        self.strided = dict(strided or {})
        self.varying = {name: tuple(kinds) for name, kinds in (varying or {}).items()}
        self._special = {name: tuple(values) for name, values in (special or {}).items()}
        self._crossed = {name: tuple(labels) for name, labels in (crossed or {}).items()}
        self._valid = valid
        self._alone = {name: tuple(labels) for name, labels in (alone or {}).items()}
        known = {axis.name: axis.values for axis in axes}
        for name, labels in (*self._crossed.items(), *self._alone.items()):
            unknown = [label for label in labels if label not in known.get(name, ())]
            if name not in known or unknown:
                raise RecordError(f"no axis {name!r} with the labels {unknown}, which were named")

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[Case]:
        """Yield the case of every point."""
        for point in self.points(dtype):
            yield self.build(point, dtype, seed)

    def always_taken(self) -> dict[str, str]:
        """Return what a kernel has to take of each argument, whatever the request says, in words.

        What is not named is dense, and has the dtype and the dimensions of every other case.
        """
        words = {name: [MEANINGS[strides]] for name, strides in self.strided.items()}
        for name, kinds in self.varying.items():
            words.setdefault(name, []).extend(_VARIATIONS[kind] for kind in kinds)
        return {name: "; ".join(said) for name, said in words.items()}

    def points(self, dtype: torch.dtype) -> list[Point]:
        """Return all points for ``dtype``, none for a dtype that the op has no cases of."""
        if dtype not in self.dtypes:
            return []
        return [p for p in self._points if self._valid is None or self._valid(p, dtype)]

    def covering(self, dtype: torch.dtype) -> list[Point]:
        """Return few points among which every label of every axis occurs.

        They are a star: one ordinary point, then others that differ from it in as little as
        possible, so that what one value of one axis brings out is not hidden by another.
        """
        chosen, covered = list[Point](), set[tuple[str, str]]()
        for point in sorted(self.points(dtype), key=self._distance):
            if not covered.issuperset(point.coordinates()):
                chosen.append(point)
                covered.update(point.coordinates())
        return chosen

    def build(self, point: Point, dtype: torch.dtype, seed: int) -> Case:
        """Return the case of ``point``, the same one for the same seed."""
        key = f"{point.label}|{dtype}|{seed}".encode()
        generator = torch.Generator().manual_seed(zlib.crc32(key))
        case = self._build(point, dtype, generator)
        arguments = dict(case.arguments)
        tensors = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
        if point.special != ORDINARY:
            special = cast(Special, point.special)
            named = [name for name, values in self._special.items() if special in values]
            tensors |= {n: with_special(tensors[n], special) for n in named if n in tensors}
        if point.layout != DENSE:
            tensors = laid_out(tensors, point.layout, self.strided)
        return replace(case, label=point.label, arguments=arguments | tensors)

    def _distance(self, point: Point) -> int:
        """Count the coordinates in which ``point`` is not an ordinary one."""
        return sum(pair not in self._center for pair in point.coordinates())

    @cached_property
    def _center(self) -> set[tuple[str, str]]:
        crossed = {name: labels[0] for name, labels in self._crossed.items() if labels}
        own = {(axis.name, crossed.get(axis.name, next(iter(axis.values)))) for axis in self.axes}
        return {*own, ("layout", DENSE), ("special", ORDINARY)}

    @cached_property
    def _points(self) -> list[Point]:
        plain = list(self._combinations({}))
        strange = list(self._combinations(self._crossed))
        layouts = [DENSE, *layouts_of(self.strided)[1:]]
        defined = {value for values in self._special.values() for value in values}
        return [
            *plain,
            *(replace(p, layout=layout) for layout in layouts[1:] for p in strange),
            *(replace(p, special=value) for value in SPECIALS if value in defined for p in strange),
        ]

    def _combinations(self, kept: Mapping[str, Sequence[str]]) -> Iterator[Point]:
        labels = [kept.get(axis.name, tuple(axis.values)) for axis in self.axes]
        for combination in product(*labels):
            named = {axis.name: label for axis, label in zip(self.axes, combination, strict=True)}
            values: dict[str, Any] = {a.name: a.values[named[a.name]] for a in self.axes}
            point = Point(named, values)
            if not self._is_redundant(point):
                yield point

    def _is_redundant(self, point: Point) -> bool:
        """Return True if a label to be tried alone stands beside others than first labels."""
        lonely = [n for n, labels in self._alone.items() if point.labels[n] in labels]
        return any(
            point.labels[axis.name] != next(iter(axis.values))
            for name in lonely
            for axis in self.axes
            if axis.name != name
        )


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case that is not built yet.

    Attributes:
        point: where it lies in its space; None for a generator that is no space.
    """

    label: str
    dtype: torch.dtype
    build: Callable[[], Case]
    point: Point | None = None


def planned_cases(
    op: CustomOp[..., Any], seed: int, *, quick: bool = False
) -> Iterator[PlannedCase]:
    """Yield the cases of ``op`` in all dtypes; only a covering few of a space if ``quick``."""
    space = op.cases
    if not isinstance(space, CaseSpace):
        for dtype in FLOATS:
            for case in space(dtype, seed):
                yield PlannedCase(case.label, dtype, partial(_identity, case))
        return
    for dtype in space.dtypes:
        for point in space.covering(dtype) if quick else space.points(dtype):
            yield PlannedCase(point.label, dtype, partial(space.build, point, dtype, seed), point)


def _identity(case: Case) -> Case:
    return case
