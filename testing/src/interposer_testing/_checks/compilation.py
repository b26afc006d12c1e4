"""The checks of a kernel's properties under ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from interposer import Case
from interposer.errors import described, foreign_errors
from interposer_testing._checks.call import Subject
from interposer_testing._checks.exemplar import Exemplar, num_rows, rows_of, with_rows
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.registered_op import registered

MIN_DYNAMIC_ROWS = 3
"""Sizes of 0 and 1 are never dynamic, and the second size must differ from the first."""


def check_static(subject: Subject, exemplar: Exemplar, backend: str) -> list[Fault]:
    """Return what goes wrong when the kernel is compiled as one graph for the case's own shapes.

    A ``traceable`` kernel is traced through; an ``opaque`` one is an op of the graph.
    """
    with _compiled(subject, backend) as compiled:
        return _faults(subject, exemplar.build(), compiled)


def check_dynamic(subject: Subject, exemplar: Exemplar, backend: str) -> list[Fault]:
    """Return what goes wrong when the number of rows is dynamic.

    The second size must be served by what was compiled for the first.
    """
    op, case = subject.op, exemplar.build()
    rows, varying = num_rows(op, case), tuple(rows_of(op, case.arguments, slice(None)))
    first, second = case, with_rows(op, case, rows - 1)
    with _compiled(subject, backend) as compiled:

        def dynamic(*arguments: Any) -> Any:
            # An argument that is left out at the end has its default, which is no tensor.
            given = dict.fromkeys(op.batched) | dict(
                zip(op.signature.parameters, arguments, strict=False)
            )
            for name in varying:
                torch._dynamo.mark_dynamic(given[name], 0)
            return compiled(*arguments)

        faults = _faults(subject, first, dynamic, f"with {rows} rows")
        if faults:
            return faults
        with torch.compiler.set_stance("fail_on_recompile"):
            return _faults(subject, second, compiled, f"with {rows - 1} rows after {rows}")


def why_no_compiler(device: str) -> str:
    """Return why torch's compiler cannot build code for ``device``, empty where it can."""
    if torch.device(device).type != "cpu":
        return "" if find_spec("triton") else "triton is not installed, which inductor needs"
    try:
        # Imported here, as few need it.
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except foreign_errors() as error:
        return f"inductor finds no C++ compiler: {described(error)}"
    return ""


@contextmanager
def _compiled(subject: Subject, backend: str) -> Iterator[Callable[..., Any]]:
    # What was compiled for other cases counts against the number of recompilations.
    torch.compiler.reset()
    with warnings.catch_warnings():
        # Of compilers, about what they import.
        warnings.simplefilter("ignore")
        try:
            if "traceable" in subject.properties:
                yield torch.compile(subject.function, fullgraph=True, backend=backend)
                return
            with registered(subject) as op:
                yield torch.compile(lambda *args: op(*args), fullgraph=True, backend=backend)
        finally:
            torch.compiler.reset()


def _faults(
    subject: Subject, case: Case, compiled: Callable[..., Any], where: str = "compiled"
) -> list[Fault]:
    given = subject.given(case)
    if "traceable" not in subject.properties:
        # The registered op takes the constants as they are and prepares them itself.
        given = Subject(subject.op, subject.function, device=subject.device).given(case)
    try:
        call = subject.call(given, compiled)
    except foreign_errors() as error:
        return [Fault.raised("compile", where, error)]
    expectation = Expectation.of(subject.op, case, given)
    return [
        Fault("compile", where, f"{fault.where}: {fault.reason}", fault.error, fault.bound)
        for fault in expectation.departures(call)
    ]
