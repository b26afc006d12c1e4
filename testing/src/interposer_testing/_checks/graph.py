"""The checks that a kernel can be captured into a graph and replayed on other numbers."""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Platform
from interposer.errors import foreign_errors
from interposer_testing._checks.call import Call, Subject
from interposer_testing._checks.exemplar import Exemplar
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault


def check_no_waiting(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Return a fault if the reference asks for a value, for which the host waits.

    Fake tensors have none, so that whatever asks for one raises.
    """
    arguments = exemplar.build().arguments
    try:
        subject.op.fake(*subject.positional(arguments))
    except foreign_errors() as error:
        return [Fault.raised("graph", "call", error)]
    return []


def check_capture(subject: Subject, exemplar: Exemplar, platform: Platform) -> list[Fault]:
    """Return what goes wrong when the kernel is captured on some numbers and replayed on others.

    Fresh arguments are copied into the captured ones before the replay; what was prepared of the
    constants stays, as it does in a layer.
    """
    case = exemplar.build()
    before = _captured_on(subject, exemplar, case)
    given = subject.given(before)
    results: list[Any] = []

    def step() -> Any:
        results[:] = [subject.call(given).result]
        return results[0]

    try:
        replay = platform.capture_graph(step)
        for name, operand in given.operands.items():
            if name not in subject.op.constants:
                operand.tensor.copy_(case.arguments[name])
        replay()
        platform.synchronize(subject.device)
    except foreign_errors() as error:
        return [Fault.raised("graph", "capture", error)]
    expectation = Expectation.of(subject.op, case, given)
    return [
        Fault("graph", "replay", f"{fault.where}: {fault.reason}", fault.error, fault.bound)
        for fault in expectation.departures(Call(given, results[0]))
    ]


def _captured_on(subject: Subject, exemplar: Exemplar, case: Case) -> Case:
    """Return a case of the same form with other numbers, but the same constants."""
    other = exemplar.build(1)
    tensors = {
        name: other.arguments[name]
        for name, value in case.arguments.items()
        if isinstance(value, torch.Tensor) and name not in subject.op.constants
    }
    if not all(_same_form(value, other.arguments[name]) for name, value in case.arguments.items()):
        tensors = {
            name: case.arguments[name] / 2
            for name in tensors
            if case.arguments[name].dtype.is_floating_point
        }
    return Case("captured", {**case.arguments, **tensors}, case.dims)


def _same_form(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return isinstance(other, torch.Tensor) and other.shape == one.shape
