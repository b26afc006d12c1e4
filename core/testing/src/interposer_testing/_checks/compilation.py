"""The checks of a kernel under ``torch.compile``."""

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
"""Fewest rows for ``check_dynamic``, which needs two sizes: torch never makes 0 and 1 dynamic."""


def check_static(subject: Subject, exemplar: Exemplar, backend: str) -> list[Fault]:
    """Check the kernel compiled as one graph with static shapes.

    torch traces into a ``traceable`` kernel; an ``opaque`` kernel becomes an op of the graph.
    """
    with _compiled(subject, backend) as compiled:
        return _faults(subject, exemplar.build(), compiled)


def check_dynamic(subject: Subject, exemplar: Exemplar, backend: str) -> list[Fault]:
    """Check the kernel compiled with a dynamic number of rows.

    A second call with fewer rows must reuse the compiled code.
    """
    op, case = subject.op, exemplar.build()
    rows, varying = num_rows(op, case), tuple(rows_of(op, case.arguments, slice(None)))
    first, second = case, with_rows(op, case, rows - 1)
    with _compiled(subject, backend) as compiled:

        def dynamic(*arguments: Any) -> Any:
            # Omitted arguments at the end have their defaults, which are no tensors.
            arguments_by_name = dict.fromkeys(op.batched) | dict(
                zip(op.signature.parameters, arguments, strict=False)
            )
            for name in varying:
                torch._dynamo.mark_dynamic(arguments_by_name[name], 0)
            return compiled(*arguments)

        # The first call compiles with dynamic rows; the second one must not compile again.
        faults = _faults(subject, first, dynamic, f"with {rows} rows")
        if faults:
            return faults
        with torch.compiler.set_stance("fail_on_recompile"):
            return _faults(subject, second, compiled, f"with {rows - 1} rows after {rows}")


def why_no_compiler(device: str) -> str:
    """Return why torch cannot compile code for ``device``; "" if a compiler is installed."""
    if torch.device(device).type != "cpu":
        return "" if find_spec("triton") else "triton is not installed, which inductor needs"
    try:
        # Slow to import, and only needed here.
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except foreign_errors() as error:
        return f"inductor finds no C++ compiler: {described(error)}"
    return ""


@contextmanager
def _compiled(subject: Subject, backend: str) -> Iterator[Callable[..., Any]]:
    # Forget compiled code of other cases, which counts towards torch's limit of recompilations.
    torch.compiler.reset()
    with warnings.catch_warnings():
        # Ignore warnings about modules that the compiler imports.
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
    call_arguments = subject.given(case)
    if "traceable" not in subject.properties:
        # The registered op takes the original constants and prepares them itself.
        unprepared = Subject(subject.op, subject.function, device=subject.device)
        call_arguments = unprepared.given(case)
    try:
        call = subject.call(call_arguments, compiled)
    except foreign_errors() as error:
        return [Fault.raised("compile", where, error)]
    expectation = Expectation.of(subject.op, case, call_arguments)
    return [
        Fault("compile", where, f"{fault.where}: {fault.reason}", fault.error, fault.bound)
        for fault in expectation.departures(call)
    ]
