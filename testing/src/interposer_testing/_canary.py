"""The canary's comparison of one kernel with the reference of its op, on a few cases.

The core calls ``compare`` by name, in the process that examines plugins.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from interposer import Case, CustomOp
from interposer.errors import described, foreign_errors
from interposer_testing._checks.call import Prepare
from interposer_testing._checks.kernel import check_kernel
from interposer_testing.cases import planned_cases

_MOST_CASES = 8
_MOST_FAULTS = 3
_NUM_TOKENS = 3
_SEED = 0
# The reference computes in float64, and every operand is guarded by copies.
_MOST_WEIGHT_ELEMENTS = 1 << 24
# A kernel may be compiled when it is first called.
_PATIENCE = 12.0

Begin = Callable[[str, float], None]


class Comparison(NamedTuple):
    """The outcome of a comparison: ``traceback`` is that of the first case that raised."""

    num_cases: int
    faults: list[str]
    traceback: str


def compare(
    op: CustomOp[..., Any],
    function: Callable[..., Any],
    prepare: Prepare | None,
    *,
    name: str,
    dtype: str,
    dims: Mapping[str, Any],
    device: str,
    takes: Callable[[Mapping[str, Any]], bool],
    begin: Begin,
    fenced: bool = False,
) -> Comparison:
    """Run a kernel on the smallest cases that it takes, and on one of the size that is asked for.

    It ends with the case that brings the third fault.

    Args:
        name: that of the kernel, for those who are told.
        dtype: the name of the dtype of the cases, as in ``"bfloat16"``.
        dims: those of the request.
        device: where the kernel runs.
        takes: says whether the kernel takes the dims of a case.
        begin: told each step, and how many times the usual limit it may take.
        fenced: touching memory beside the arguments ends the process.
    """
    faults: list[str] = []
    trace = ""
    num_cases = 0
    # On the CPU wherever the caller builds its model: a model may be planned without memory.
    with torch.device("cpu"):
        for case in _cases(op, getattr(torch, dtype), dims, takes, begin):
            begin(f"running {name} on case {case.label!r}", _PATIENCE)
            num_cases += 1
            try:
                found = check_kernel(
                    op, function, case, prepare=prepare, device=device, fenced=fenced
                )
                faults += [f"on case {case.label!r}, {fault}" for fault in found]
            except foreign_errors() as error:
                trace = trace or traceback.format_exc()
                faults.append(f"on case {case.label!r} it raised {described(error)}")
            if len(faults) >= _MOST_FAULTS:
                break
    return Comparison(num_cases, faults[:_MOST_FAULTS], trace)


def _cases(
    op: CustomOp[..., Any],
    dtype: torch.dtype,
    dims: Mapping[str, Any],
    takes: Callable[[Mapping[str, Any]], bool],
    begin: Begin,
) -> Iterator[Case]:
    begin(f"preparing cases of the op {op.name!r}", _PATIENCE)
    planned = planned_cases(op, _SEED, quick=True)
    built = (plan.build() for plan in planned if plan.dtype == dtype)
    yield from _selected(sorted((c for c in built if takes(c.dims)), key=_num_elements))
    if op.sample is not None and _weight_elements(dims) <= _MOST_WEIGHT_ELEMENTS:
        begin(f"preparing a sample of the op {op.name!r}", _PATIENCE)
        yield op.sample(dtype, dims, _NUM_TOKENS, _SEED)


def _selected(cases: list[Case]) -> list[Case]:
    """Return the first cases, and before them the first with each layout of an argument."""
    seen: set[tuple[str, str]] = set()
    telling: list[Case] = []
    others: list[Case] = []
    for case in cases:
        layouts = {(n, _layout(v)) for n, v in case.arguments.items() if _is_filled(v)}
        (others if layouts <= seen else telling).append(case)
        seen |= layouts
    return [*telling, *others][:_MOST_CASES]


def _is_filled(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _layout(tensor: torch.Tensor) -> str:
    if not tensor.is_contiguous():
        return "strided"
    return "offset" if tensor.storage_offset() else "dense"


def _num_elements(case: Case) -> int:
    values = case.arguments.values()
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))


def _weight_elements(dims: Mapping[str, Any]) -> int:
    """Return how large a weight the dims can mean: that of the two largest of them."""
    sizes = sorted(size for size in dims.values() if type(size) is int)
    return math.prod(sizes[-2:])
