"""The canary: a quick comparison of one kernel with the reference of its op before first use.

The core imports ``compare`` by name in the sandboxed process that examines plugins.
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

# Few cases and tokens, because the first use of a kernel waits for the comparison.
_MAX_CASES = 8
_MAX_FAULTS = 3
_NUM_TOKENS = 3
_SEED = 0
# A sample with a larger weight is skipped: the reference widens it to float64, and the check keeps
# several copies of every operand.
_MAX_WEIGHT_ELEMENTS = 1 << 24
# Factor of the usual time limit, because the first call may compile the kernel.
_TIME_FACTOR = 12.0

Begin = Callable[[str, float], None]


class Comparison(NamedTuple):
    """The result of a comparison, with the traceback of the first case that raised."""

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
    """Run a kernel on the smallest cases that it accepts, and on one case of the requested size.

    The comparison stops at the third fault.

    Args:
        name: name of the kernel, for messages.
        dtype: name of the dtype of the cases, such as ``"bfloat16"``.
        dims: dims of the request.
        device: torch device on which the kernel runs.
        takes: returns whether the kernel accepts the dims of a case.
        begin: called with the name of each step and the factor of the time limit for that step.
        fenced: end the process if the kernel touches memory outside its arguments.
    """
    faults: list[str] = []
    trace = ""
    num_cases = 0
    # Build cases on the CPU: the caller may plan a model on the meta device.
    with torch.device("cpu"):
        for case in _cases(op, getattr(torch, dtype), dims, takes, begin):
            begin(f"running {name} on case {case.label!r}", _TIME_FACTOR)
            num_cases += 1
            try:
                case_faults = check_kernel(
                    op, function, case, prepare=prepare, device=device, fenced=fenced
                )
                # The messages are shown without the case, so name it.
                faults += [f"on case {case.label!r}, {fault}" for fault in case_faults]
            except foreign_errors() as error:
                trace = trace or traceback.format_exc()
                faults.append(f"on case {case.label!r} it raised {described(error)}")
            if len(faults) >= _MAX_FAULTS:
                break
    return Comparison(num_cases, faults[:_MAX_FAULTS], trace)


def _cases(
    op: CustomOp[..., Any],
    dtype: torch.dtype,
    dims: Mapping[str, Any],
    takes: Callable[[Mapping[str, Any]], bool],
    begin: Begin,
) -> Iterator[Case]:
    begin(f"preparing cases of the op {op.name!r}", _TIME_FACTOR)
    planned = planned_cases(op, _SEED, quick=True)
    built = (plan.build() for plan in planned if plan.dtype == dtype)
    yield from _selected(sorted((c for c in built if takes(c.dims)), key=_num_elements))
    if op.sample is not None and _weight_elements(dims) <= _MAX_WEIGHT_ELEMENTS:
        begin(f"preparing a sample of the op {op.name!r}", _TIME_FACTOR)
        yield op.sample(dtype, dims, _NUM_TOKENS, _SEED)


def _selected(cases: list[Case]) -> list[Case]:
    """Return the first cases, reordered so that cases with new argument layouts come first."""
    covered_layouts: set[tuple[str, str]] = set()
    with_new_layout: list[Case] = []
    with_old_layouts: list[Case] = []
    for case in cases:
        layouts = {(n, _layout(v)) for n, v in case.arguments.items() if _is_filled(v)}
        (with_old_layouts if layouts <= covered_layouts else with_new_layout).append(case)
        covered_layouts |= layouts
    return [*with_new_layout, *with_old_layouts][:_MAX_CASES]


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
    """Estimate the elements of a request's largest weight: the product of the two largest dims."""
    sizes = sorted(size for size in dims.values() if type(size) is int)
    return math.prod(sizes[-2:])
