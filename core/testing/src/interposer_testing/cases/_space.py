"""The space of an op's test cases, which are enumerated without being built."""

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
"""A property of an argument that may vary: None or not, dtype, number of dimensions."""

_VARIATIONS: Mapping[Variation, str] = {
    "absent": "may be None",
    "dtype": "in each dtype that the op names",
    "rank": "in each number of dimensions that the op names",
}


class CaseSpace:
    """A generator of test cases, which are the points of a space of axes.

    The points are all combinations of the axes with dense memory and ordinary numbers. In addition,
    combinations of the labels in ``crossed`` have one other memory layout or special value.

    Attributes:
        axes: the properties in which the cases differ.
        dtypes: the dtypes of the cases.
        strided: accepted strides by argument.
        varying: properties of arguments that vary although no dim of a request states them.
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
        """Define the space of cases by its axes.

        Args:
            build: builds the case of a point with dense memory and ordinary numbers; the label of
                the case is ignored.
            strided: accepted strides by argument; dense for all other arguments.
            varying: by argument, properties that no dim states, so every kernel must accept them.
            special: by argument, special values for which the op defines results.
            crossed: by axis, the labels that are combined with layouts and special values; all
                labels of axes that are not listed. Their cases must not be empty.
            alone: by axis, the labels that are combined only with the first label of every other
                axis, such as empty shapes.
            valid: returns whether a point exists for a dtype; the default accepts all.

        Raises: RecordError: ``crossed`` or ``alone`` names an unknown axis or label.
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
        values_by_axis = {axis.name: axis.values for axis in axes}
        for name, labels in (*self._crossed.items(), *self._alone.items()):
            unknown = [label for label in labels if label not in values_by_axis.get(name, ())]
            if name not in values_by_axis or unknown:
                raise RecordError(f"no axis {name!r} with the labels {unknown}, which were named")

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[Case]:
        """Yield the cases of all points in ``dtype``."""
        for point in self.points(dtype):
            yield self.build(point, dtype, seed)

    def always_taken(self) -> dict[str, str]:
        """Describe, by argument, the memory layouts and values that every kernel must accept.

        Arguments that are not listed are always dense, with a fixed dtype and number of dimensions.
        """
        words = {name: [MEANINGS[strides]] for name, strides in self.strided.items()}
        for name, kinds in self.varying.items():
            words.setdefault(name, []).extend(_VARIATIONS[kind] for kind in kinds)
        return {name: "; ".join(phrases) for name, phrases in words.items()}

    def points(self, dtype: torch.dtype) -> list[Point]:
        """Return all points for ``dtype``; empty if the op has no cases in ``dtype``."""
        if dtype not in self.dtypes:
            return []
        return [p for p in self._points if self._valid is None or self._valid(p, dtype)]

    def covering(self, dtype: torch.dtype) -> list[Point]:
        """Return a few points that contain every label of every axis.

        The first point is the ordinary one; the others differ from it in as few labels as possible.
        So a fault that one label causes is not hidden by another label.
        """
        points, covered = list[Point](), set[tuple[str, str]]()
        for point in sorted(self.points(dtype), key=self._distance):
            if not covered.issuperset(point.coordinates()):
                points.append(point)
                covered.update(point.coordinates())
        return points

    def build(self, point: Point, dtype: torch.dtype, seed: int) -> Case:
        """Build the case of ``point``; equal seeds give equal cases."""
        # Derive the seed from the point, so that each case is independent of all others.
        key = f"{point.label}|{dtype}|{seed}".encode()
        generator = torch.Generator().manual_seed(zlib.crc32(key))
        case = self._build(point, dtype, generator)
        arguments = dict(case.arguments)
        tensors = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
        if point.special != ORDINARY:
            special = cast(Special, point.special)
            names = [name for name, values in self._special.items() if special in values]
            tensors |= {n: with_special(tensors[n], special) for n in names if n in tensors}
        # Last, because special values are set in contiguous copies.
        if point.layout != DENSE:
            tensors = laid_out(tensors, point.layout, self.strided)
        return replace(case, label=point.label, arguments=arguments | tensors)

    def _distance(self, point: Point) -> int:
        """Count the axes on which ``point`` differs from the ordinary point."""
        return sum(pair not in self._center for pair in point.coordinates())

    @cached_property
    def _center(self) -> set[tuple[str, str]]:
        crossed = {name: labels[0] for name, labels in self._crossed.items() if labels}
        labels = {
            (axis.name, crossed.get(axis.name, next(iter(axis.values)))) for axis in self.axes
        }
        return {*labels, ("layout", DENSE), ("special", ORDINARY)}

    @cached_property
    def _points(self) -> list[Point]:
        plain = list(self._combinations({}))
        crossed = list(self._combinations(self._crossed))
        layouts = [DENSE, *layouts_of(self.strided)[1:]]
        defined = {value for values in self._special.values() for value in values}
        return [
            *plain,
            *(replace(p, layout=layout) for layout in layouts[1:] for p in crossed),
            *(replace(p, special=value) for value in SPECIALS if value in defined for p in crossed),
        ]

    def _combinations(self, limits: Mapping[str, Sequence[str]]) -> Iterator[Point]:
        """Yield combinations of labels, except redundant ones; ``limits`` restricts some axes."""
        labels_by_axis = [limits.get(axis.name, tuple(axis.values)) for axis in self.axes]
        for combination in product(*labels_by_axis):
            labels = {axis.name: label for axis, label in zip(self.axes, combination, strict=True)}
            values: dict[str, Any] = {a.name: a.values[labels[a.name]] for a in self.axes}
            point = Point(labels, values)
            if not self._is_redundant(point):
                yield point

    def _is_redundant(self, point: Point) -> bool:
        """Tell whether a label that is tested alone is combined with another unusual label."""
        alone = [n for n, labels in self._alone.items() if point.labels[n] in labels]
        return any(
            point.labels[axis.name] != next(iter(axis.values))
            for name in alone
            for axis in self.axes
            if axis.name != name
        )


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """The label and dtype of a case, which is built only on demand.

    Attributes:
        point: its point in the case space; None for a generator that is no space.
    """

    label: str
    dtype: torch.dtype
    build: Callable[[], Case]
    point: Point | None = None


def planned_cases(
    op: CustomOp[..., Any], seed: int, *, quick: bool = False
) -> Iterator[PlannedCase]:
    """Yield the cases of ``op`` in all dtypes; if ``quick``, only the covering cases."""
    space = op.cases
    if not isinstance(space, CaseSpace):
        # A plain generator has to build a case before its label is known.
        for dtype in FLOATS:
            for case in space(dtype, seed):
                yield PlannedCase(case.label, dtype, partial(_identity, case))
        return
    for dtype in space.dtypes:
        for point in space.covering(dtype) if quick else space.points(dtype):
            yield PlannedCase(point.label, dtype, partial(space.build, point, dtype, seed), point)


def _identity(case: Case) -> Case:
    return case
