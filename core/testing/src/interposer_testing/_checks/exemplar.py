"""Exemplars: a few small cases of an op, for checks that are too slow to run on all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from interposer import Case, CustomOp, Dims
from interposer_testing.cases._axis import ORDINARY
from interposer_testing.cases._space import CaseSpace, PlannedCase, planned_cases

# A batch of three has a first row, a last row and one between them.
_ENOUGH_ROWS = 3


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A case without empty tensors or special values, which can be rebuilt with other numbers.

    Attributes:
        num_rows: number of tokens or sequences that the op treats independently, or 0.
    """

    op: CustomOp[..., Any]
    planned: PlannedCase
    seed: int
    dims: Dims
    num_rows: int
    num_elements: int
    dense: bool

    def build(self, number: int = 0) -> Case:
        """Build the exemplar's case; every ``number`` gives other values of the same form.

        If the op's generator ignores the seed, every ``number`` gives the same case.
        """
        space, planned = self.op.cases, self.planned
        if not number:
            return planned.build()
        if isinstance(space, CaseSpace) and planned.point is not None:
            return space.build(planned.point, planned.dtype, self.seed + number)
        cases = space(planned.dtype, self.seed + number)
        return next((case for case in cases if case.label == planned.label), planned.build())


def exemplars(op: CustomOp[..., Any], seed: int) -> Iterator[Exemplar]:
    """Yield the small cases of ``op`` without empty tensors or special values."""
    for planned in planned_cases(op, seed, quick=True):
        exemplar = exemplar_of(op, planned, planned.build(), seed)
        if exemplar is not None:
            yield exemplar


def exemplar_of(
    op: CustomOp[..., Any], planned: PlannedCase, case: Case, seed: int
) -> Exemplar | None:
    """Create an exemplar from ``case``; None for empty tensors, special values or no tensors."""
    tensors = [v for v in case.arguments.values() if isinstance(v, torch.Tensor)]
    is_special = planned.point is not None and planned.point.special != ORDINARY
    if is_special or not tensors or not all(tensor.numel() for tensor in tensors):
        return None
    is_dense = all(tensor.is_contiguous() for tensor in tensors)
    num_elements = sum(tensor.numel() for tensor in tensors)
    return Exemplar(op, planned, seed, case.dims, num_rows(op, case), num_elements, is_dense)


def best_exemplars(
    candidates: list[Exemplar], accepts: Callable[[Exemplar], bool]
) -> list[list[Exemplar]]:
    """Return for each dtype the smallest strided and the smallest dense exemplar.

    Of the two, an exemplar with at least three rows comes first, then the strided one.
    """
    # Sorted by size, so ``setdefault`` keeps the smallest exemplar of each kind.
    best: dict[torch.dtype, dict[bool, Exemplar]] = {}
    for exemplar in sorted(candidates, key=lambda e: (_lacks_rows(e), e.num_elements)):
        if accepts(exemplar):
            best.setdefault(exemplar.planned.dtype, {}).setdefault(exemplar.dense, exemplar)
    dtypes = dict.fromkeys(exemplar.planned.dtype for exemplar in candidates)
    return [
        sorted(best[dtype].values(), key=lambda e: (_lacks_rows(e), e.dense))
        for dtype in dtypes
        if dtype in best
    ]


def has_rows(op: CustomOp[..., Any]) -> bool:
    """Return whether the op declares batched or ragged arguments."""
    return bool(op.batched or op.ragged)


def num_rows(op: CustomOp[..., Any], case: Case) -> int:
    """Return the number of tokens or sequences that the op treats independently, or 0."""
    # Every list of start offsets has one entry per sequence, so use the first.
    for starts in op.ragged.values():
        return len(case.arguments[starts]) - 1
    return max(map(len, rows_of(op, case.arguments, slice(None)).values()), default=0)


def with_rows(op: CustomOp[..., Any], case: Case, num: int) -> Case:
    """Return a case with only the first ``num`` tokens or sequences of ``case``."""
    rows = rows_of(op, case.arguments, slice(num))
    return replace(case, arguments={**case.arguments, **rows})


def rows_of(
    op: CustomOp[..., Any], arguments: Mapping[str, Any], selection: slice
) -> dict[str, torch.Tensor]:
    """Slice the arguments that have one entry per token or sequence.

    An argument with a single row is broadcast to all rows, and therefore not sliced. Ragged
    sequences are sliced together with their start offsets.
    """
    tensors = {n: v for n in op.batched if isinstance(v := arguments[n], torch.Tensor) and v.ndim}
    batch_size = max(map(len, tensors.values()), default=0)
    rows = {name: value[selection] for name, value in tensors.items() if len(value) == batch_size}
    for name, starts_name in op.ragged.items():
        starts = arguments[starts_name]
        first, last, _ = selection.indices(len(starts) - 1)
        rows[starts_name] = starts[first : last + 1] - starts[first]
        rows[name] = arguments[name][starts[first] : starts[last]]
    return rows


def _lacks_rows(exemplar: Exemplar) -> bool:
    return has_rows(exemplar.op) and exemplar.num_rows < _ENOUGH_ROWS
