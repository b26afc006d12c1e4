"""The check of one kernel on one case, against the reference of its op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from interposer import Case, CustomOp
from interposer_testing._checks.call import Given, Prepare, Subject, storages
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.operand import poisoned_memory


def check_kernel(
    op: CustomOp[..., Any],
    function: Callable[..., Any],
    case: Case,
    *,
    prepare: Prepare | None = None,
    device: str = "cpu",
    fenced: bool = False,
) -> list[Fault]:
    """Return everything in which ``function`` departs from the reference of ``op`` on ``case``.

    It is called twice with equal arguments, first with uninitialised memory poisoned. Checked are
    values and mutated arguments against the reference in float64, the form of the result against
    the fake kernel, that nothing undeclared is written, that results share no memory with
    arguments unless the reference's do, and that a second call leaves the first result alone.
    What ``function`` raises is passed on.

    Args:
        function: takes the op's arguments by position; constants as ``prepare`` returned them.
        prepare: takes the op's constants by name and returns their replacements by the same names.
        device: where to run; the reference runs in host memory.
        fenced: memory behind the arguments, in the second call before them, may not be touched at
            all: whoever does so ends the process. Only of a CPU.
    """
    subject = Subject(op, function, prepare, device=device)
    return check_subject(subject, case, partial(Expectation.of, op, case), fenced)


def check_subject(
    subject: Subject, case: Case, expect: Callable[[Given], Expectation], fenced: bool = False
) -> list[Fault]:
    """Return the faults as ``check_kernel`` does; ``expect`` may cache expectations."""
    with poisoned_memory():
        first = subject.call(subject.given(case, "after" if fenced else ""))
    kept = [tensor.clone() for tensor in first.outputs]
    second = subject.call(subject.given(case, "before" if fenced else ""))
    # Its bounds are those of the subject, which may be allowed more than others of the case.
    expectation = replace(expect(first.given), op=subject.op)
    faults = list(expectation.faults(first))
    if not faults:
        faults += expectation.faults(second)
    if storages(first.outputs) & storages(second.outputs):
        reason = "a second call returns the memory of the first result"
        faults.append(Fault("alias", "second call", reason))
    elif not all(map(_is_same, kept, first.outputs)):
        faults.append(Fault("alias", "second call", "it changes the first result"))
    return faults


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
