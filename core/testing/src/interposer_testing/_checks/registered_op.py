"""A kernel registered as a torch op, and the checks of ``torch.library.opcheck``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from interposer import Case
from interposer_testing._checks.call import Subject, tensors_of
from interposer_testing._checks.exemplar import Exemplar
from interposer_testing._checks.fault import Fault

_TRACED = "test_aot_dispatch_dynamic"
_TESTS = {
    "test_schema": "it writes or returns other tensors than the schema declares",
    "test_faketensor": "its results differ in form from those of the derived fake kernel",
    _TRACED: "traced with dynamic shapes, it computes a different result",
}
_numbers = count()


def check_opcheck(subject: Subject, exemplar: Exemplar, *, traced: bool = True) -> list[Fault]:
    """Run ``torch.library.opcheck`` on the kernel, registered with the op's schema.

    The test of gradient registration is omitted, because kernels are for inference.

    Args:
        traced: also run the tracing test, which takes ten times as long as all others.
    """
    case = _without_nan(exemplar.build())
    arguments = subject.given(case).arguments
    tests = [name for name in _TESTS if traced or name != _TRACED]
    tensors = (value for value in case.arguments.values() if isinstance(value, torch.Tensor))
    # torch's schema test multiplies the arguments, which torch cannot do with 8-bit floats.
    if any(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in tensors):
        tests.remove("test_schema")
    with registered(subject) as op:
        outcome = torch.library.opcheck(
            op, subject.positional(arguments), test_utils=tests, raise_exception=False
        )
        # The tracing test compares two runs, in which NaN would differ from NaN.
        if any(t.isnan().any() for t in tensors_of(op(*subject.positional(arguments)))):
            outcome.pop(_TRACED, None)
    return [
        Fault("opcheck", name, f"{_TESTS[name]}: {_first_lines(error)}")
        for name, error in outcome.items()
        if error != "SUCCESS"
    ]


@contextmanager
def registered(subject: Subject) -> Iterator[Any]:
    """Register the kernel as a torch op within a block, under a new name with the op's schema."""
    op = subject.op

    def implementation(*args: Any, **kwargs: Any) -> Any:
        call = op.signature.bind(*args, **kwargs)
        call.apply_defaults()
        prepared = subject.prepared(call.arguments)
        return subject.function(*subject.positional({**call.arguments, **prepared}))

    namespace = f"interposer_verify_{next(_numbers)}"
    name = f"{namespace}::{op.name}"
    # torch has no public way to undo a registration.
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define(op.schema)
        device_type = torch.device(subject.device).type
        torch.library.impl(name, device_type, implementation, lib=library)
        torch.library.register_fake(name, op.reference, lib=library)
        yield getattr(getattr(torch.ops, namespace), op.name).default


def _without_nan(case: Case) -> Case:
    """Replace NaN in arguments, such as unwritten slots of a cache, by zeros."""
    arguments = {
        name: torch.where(value.isnan(), 0, value) if _has_nan(value) else value
        for name, value in case.arguments.items()
    }
    return replace(case, arguments=arguments)


def _has_nan(value: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and value.dtype.is_floating_point):
        return False
    return bool(value.isnan().any())


def _first_lines(error: object) -> str:
    """Return the first lines of torch's message, without the advice that follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
