"""The checks that a kernel can be captured into a graph and replayed with other values."""

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
    """Check that the reference never reads a tensor value on the host.

    Such a read waits for the device, which a graph cannot capture. The reference runs on fake
    tensors, which have no values, so every read raises.
    """
    arguments = exemplar.build().arguments
    try:
        subject.op.fake(*subject.positional(arguments))
    except foreign_errors() as error:
        return [Fault.raised("graph", "call", error)]
    return []


def check_capture(subject: Subject, exemplar: Exemplar, platform: Platform) -> list[Fault]:
    """Capture the kernel with some values, replay the graph with others, and check the result.

    New values are copied into the captured arguments before the replay. Prepared constants do not
    change, as in a layer.
    """
    case = exemplar.build()
    call_arguments = subject.given(_case_for_capture(subject, exemplar, case))
    results: list[Any] = []

    # The capture may run the function several times; only the last result is replayed.
    def step() -> Any:
        results[:] = [subject.call(call_arguments).result]
        return results[0]

    try:
        replay = platform.capture_graph(step)
        for name, operand in call_arguments.operands.items():
            if name not in subject.op.constants:
                operand.tensor.copy_(case.arguments[name])
        replay()
        platform.synchronize(subject.device)
    except foreign_errors() as error:
        return [Fault.raised("graph", "capture", error)]
    expectation = Expectation.of(subject.op, case, call_arguments)
    return [
        Fault("graph", "replay", f"{fault.where}: {fault.reason}", fault.error, fault.bound)
        for fault in expectation.departures(Call(call_arguments, results[0]))
    ]


def _case_for_capture(subject: Subject, exemplar: Exemplar, case: Case) -> Case:
    """Return a case with the form and constants of ``case`` but other values, for the capture."""
    variant = exemplar.build(1)
    tensors = {
        name: variant.arguments[name]
        for name, value in case.arguments.items()
        if isinstance(value, torch.Tensor) and name not in subject.op.constants
    }
    if not all(_same_form(v, variant.arguments[name]) for name, v in case.arguments.items()):
        # Another seed gave other shapes: halve the values of this case instead.
        tensors = {
            name: case.arguments[name] / 2
            for name in tensors
            if case.arguments[name].dtype.is_floating_point
        }
    return Case("captured", {**case.arguments, **tensors}, case.dims)


def _same_form(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor):
        return type(first) is type(second) and bool(first == second)
    return isinstance(second, torch.Tensor) and second.shape == first.shape
