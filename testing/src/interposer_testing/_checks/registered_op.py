"""A kernel as an op of torch's own registry, and torch's checks of that."""

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
    "test_schema": "what it writes or returns is not what the schema declares",
    "test_faketensor": "its results differ in form from those of the derived fake kernel",
    _TRACED: "traced with dynamic shapes it computes something else",
}
_numbers = count()


def check_opcheck(subject: Subject, exemplar: Exemplar, *, traced: bool = True) -> list[Fault]:
    """Return what ``torch.library.opcheck`` finds in the kernel, registered with the op's schema.

    Whether gradients are registered is left out: kernels are for inference.

    Args:
        traced: try tracing too, which takes ten times as long as the rest.
    """
    case = _without_nan(exemplar.build())
    arguments = subject.given(case).arguments
    tests = [name for name in _TESTS if traced or name != _TRACED]
    given = (value for value in case.arguments.values() if isinstance(value, torch.Tensor))
    # torch's own check of the schema multiplies what it was given, which it cannot do in 8 bits.
    if any(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in given):
        tests.remove("test_schema")
    with registered(subject) as op:
        outcome = torch.library.opcheck(
            op, subject.positional(arguments), test_utils=tests, raise_exception=False
        )
        # What is NaN anyway is not equal to itself where both runs are compared.
        if any(t.isnan().any() for t in tensors_of(op(*subject.positional(arguments)))):
            outcome.pop(_TRACED, None)
    return [
        Fault("opcheck", name, f"{_TESTS[name]}: {_first_lines(error)}")
        for name, error in outcome.items()
        if error != "SUCCESS"
    ]


@contextmanager
def registered(subject: Subject) -> Iterator[Any]:
    """Register the kernel under a name of its own, with the op's schema and derived fake."""
    op = subject.op

    def implementation(*args: Any, **kwargs: Any) -> Any:
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        prepared = subject.prepared(bound.arguments)
        return subject.function(*subject.positional({**bound.arguments, **prepared}))

    namespace = f"interposer_verify_{next(_numbers)}"
    name = f"{namespace}::{op.name}"
    # The only way of torch's to take a registration back.
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define(op.schema)
        device_type = torch.device(subject.device).type
        torch.library.impl(name, device_type, implementation, lib=library)
        torch.library.register_fake(name, op.reference, lib=library)
        yield getattr(getattr(torch.ops, namespace), op.name).default


def _without_nan(case: Case) -> Case:
    """Return the case with zeros for NaN, as in memory that a cache has not written yet."""
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
    """Return the beginning of torch's message, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
