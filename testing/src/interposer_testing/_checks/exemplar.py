"""Few small cases of an op, for checks that are too expensive for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from interposer import Case, CustomOp, Dims
from interposer_testing.cases._axis import ORDINARY
from interposer_testing.cases._space import CaseSpace, PlannedCase, planned_cases

# In a batch of three there is a first row, a last one, and one that is neither.
_ENOUGH_ROWS = 3


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A case that is not empty, has no special values, and can be built with other numbers.

    Attributes:
        num_rows: how many tokens or sequences the op treats one by one; 0 where it has none.
    """

    op: CustomOp[..., Any]
    planned: PlannedCase
    seed: int
    dims: Dims
    num_rows: int
    num_elements: int
    dense: bool

    def build(self, number: int = 0) -> Case:
        """Return the case, or another of its form whose numbers differ for every ``number``.

        A generator that does not depend on the seed yields the same numbers.
        """
        space, planned = self.op.cases, self.planned
        if not number:
            return planned.build()
        if isinstance(space, CaseSpace) and planned.point is not None:
            return space.build(planned.point, planned.dtype, self.seed + number)
        cases = space(planned.dtype, self.seed + number)
        return next((case for case in cases if case.label == planned.label), planned.build())


def exemplars(op: CustomOp[..., Any], seed: int) -> Iterator[Exemplar]:
    """Yield the covering cases of ``op`` that are fit to stand for others."""
    for planned in planned_cases(op, seed, quick=True):
        exemplar = exemplar_of(op, planned, planned.build(), seed)
        if exemplar is not None:
            yield exemplar


def exemplar_of(
    op: CustomOp[..., Any], planned: PlannedCase, case: Case, seed: int
) -> Exemplar | None:
    """Return ``case``, built as ``planned``, as an exemplar; None where it is not fit."""
    tensors = [v for v in case.arguments.values() if isinstance(v, torch.Tensor)]
    is_special = planned.point is not None and planned.point.special != ORDINARY
    if is_special or not tensors or not all(tensor.numel() for tensor in tensors):
        return None
    dense = all(tensor.is_contiguous() for tensor in tensors)
    size = sum(tensor.numel() for tensor in tensors)
    return Exemplar(op, planned, seed, case.dims, num_rows(op, case), size, dense)


def chosen(found: list[Exemplar], accepts: Callable[[Exemplar], bool]) -> list[list[Exemplar]]:
    """Return for each dtype the smallest strided and the smallest dense one, the fitter first.

    Those with several rows are fitter than others, then strided ones, then small ones.
    """
    best: dict[torch.dtype, dict[bool, Exemplar]] = {}
    for exemplar in sorted(found, key=lambda e: (_lacks_rows(e), e.num_elements)):
        if accepts(exemplar):
            best.setdefault(exemplar.planned.dtype, {}).setdefault(exemplar.dense, exemplar)
    order = list(dict.fromkeys(exemplar.planned.dtype for exemplar in found))
    return [
        sorted(best[dtype].values(), key=lambda e: (_lacks_rows(e), e.dense))
        for dtype in order
        if dtype in best
    ]


def has_rows(op: CustomOp[..., Any]) -> bool:
    """Return True if the op declares that it treats tokens or sequences one by one."""
    return bool(op.batched or op.ragged)


def num_rows(op: CustomOp[..., Any], case: Case) -> int:
    """Return the number of tokens or sequences that are treated one by one, or 0."""
    for starts in op.ragged.values():
        return len(case.arguments[starts]) - 1
    return max(map(len, rows_of(op, case.arguments, slice(None)).values()), default=0)


def with_rows(op: CustomOp[..., Any], case: Case, num: int) -> Case:
    """Return the case with the first ``num`` of its tokens or sequences."""
    rows = rows_of(op, case.arguments, slice(num))
    return replace(case, arguments={**case.arguments, **rows})


def rows_of(
    op: CustomOp[..., Any], arguments: Mapping[str, Any], chosen_rows: slice
) -> dict[str, torch.Tensor]:
    """Return the arguments that these rows have of their own.

    One row among many is there for all of them. Sequences that lie one after the other come with
    the places where they then start.
    """
    tensors = {n: v for n in op.batched if isinstance(v := arguments[n], torch.Tensor) and v.ndim}
    most = max(map(len, tensors.values()), default=0)
    rows = {name: value[chosen_rows] for name, value in tensors.items() if len(value) == most}
    for name, starts_name in op.ragged.items():
        starts = arguments[starts_name]
        first, last, _ = chosen_rows.indices(len(starts) - 1)
        rows[starts_name] = starts[first : last + 1] - starts[first]
        rows[name] = arguments[name][starts[first] : starts[last]]
    return rows


def _lacks_rows(exemplar: Exemplar) -> bool:
    return has_rows(exemplar.op) and exemplar.num_rows < _ENOUGH_ROWS
