"""The check of one kernel on one case, against the reference of the op."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from interposer import Case, CustomOp
from interposer_testing._checks.call import CallArguments, Prepare, Subject, storages
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.operand import poisoned_memory
from interposer_testing._checks.training_step import training_step


def check_kernel(
    op: CustomOp[..., Any],
    function: Callable[..., Any],
    case: Case,
    *,
    prepare: Prepare | None = None,
    device: str = "cpu",
    fenced: bool = False,
    gradients: bool = False,
) -> list[Fault]:
    """Compare ``function`` with the reference of ``op`` on ``case``.

    The function is called twice with equal arguments; in the first call, uninitialised memory is
    filled with NaN. The check compares outputs and mutated arguments with the reference in float64,
    and the form of the result with the fake kernel. Only declared arguments may be written, results
    may share memory with arguments only if the reference's do, and the second call must not change
    the first result. Exceptions of ``function`` are passed on.

    Args:
        function: takes the op's arguments by position, with constants as ``prepare`` returns them.
        prepare: takes the op's constants by name and returns their replacements by the same names.
        device: torch device for ``function``; the reference runs on the CPU.
        fenced: protect the memory after each argument, in the second call before each argument, so
            that any access ends the process. Works on a CPU only.
        gradients: compare the gradients of the op's ``differentiable`` arguments too, in further
            calls, with the autograd of the reference.
    Returns: the faults; empty if the function is correct.
    Raises: ConfigError: ``gradients`` is set, but the op declares none.
    """
    subject = Subject(op, function, prepare, device=device)
    faults = check_subject(subject, case, partial(Expectation.of, op, case), fenced)
    return faults or (check_gradients(subject, case, fenced) if gradients else [])


def check_gradients(subject: Subject, case: Case, fenced: bool = False) -> list[Fault]:
    """Compare a function's gradients with the reference's, for random gradients of the outputs."""
    step = training_step(subject.op)
    # The same gradients in every run, so that a fault can be repeated.
    case = step.case(case, torch.Generator().manual_seed(zlib.crc32(case.label.encode())))
    subject = replace(subject, op=step.op, function=step.function(subject.function))
    return check_subject(subject, case, partial(step.expectation, case), fenced)


def check_subject(
    subject: Subject,
    case: Case,
    expect: Callable[[CallArguments], Expectation],
    fenced: bool = False,
) -> list[Fault]:
    """Run ``check_kernel`` with the expected result of ``expect``, which may be cached."""
    with poisoned_memory():
        first = subject.call(subject.given(case, "after" if fenced else ""))
    first_outputs = [tensor.clone() for tensor in first.outputs]
    second = subject.call(subject.given(case, "before" if fenced else ""))
    # The cached expectation may have another tolerance than this subject.
    expectation = replace(expect(first.given), op=subject.op)
    faults = list(expectation.faults(first))
    if not faults:
        faults += expectation.faults(second)
    if storages(first.outputs) & storages(second.outputs):
        reason = "a second call returns the memory of the first result"
        faults.append(Fault("alias", "second call", reason))
    elif not all(map(_is_equal, first_outputs, first.outputs)):
        faults.append(Fault("alias", "second call", "it changes the first result"))
    return faults


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
