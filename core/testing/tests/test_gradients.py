"""Gradients of a differentiable kernel are compared with the autograd of the op's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interposer import (
    Candidate,
    Capability,
    Case,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Tolerance,
    custom_op,
    place,
)
from interposer import Verdict as Accepted
from interposer.errors import ConfigError
from interposer_ops.norms import layer_norm
from interposer_testing import (
    Budget,
    Fault,
    Solution,
    Task,
    Trial,
    Verdict,
    Workload,
    check_kernel,
    conformance,
    judge,
)
from interposer_testing._checks.kernel import check_gradients
from interposer_testing._tasks.expected import counted
from interposer_testing._trials.kernels import SeparateKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = Device("cpu", "cpu", "test", Capability("x86_64"))
SHAPES = {"rows": (5, 12), "one row": (1, 7), "one column": (3, 1), "no rows": (0, 4)}


# An op with a float and an integer output: rows divided by their norm, and a weight.


def toy_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for label, (rows, width) in SHAPES.items():
        for is_strided in (False, True):
            x = torch.randn(rows, 2 * width, generator=generator).to(dtype)
            x = x[:, ::2] if is_strided else x[:, :width].contiguous()
            weight = (0.5 + torch.rand(width, generator=generator)).to(dtype)
            yield Case(
                f"{label}, strided" if is_strided else label,
                {"x": x, "weight": weight},
                {"width": width},
                reduction=width,
                magnitude=2.0,
            )


def toy(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-2)
    return (unit * weight).to(x.dtype), (x > 0).sum(-1)


toy_norm = custom_op(
    "toy_norm",
    cases=toy_cases,
    tolerance=Tolerance(roundings=3),
    batched=("x",),
    differentiable=("x", "weight"),
)(toy)
plain_norm = custom_op("toy_norm", cases=toy_cases, tolerance=Tolerance(roundings=3))(toy)


def faults_of(kernel: Callable[..., Any]) -> list[Fault]:
    return [
        fault
        for dtype in DTYPES
        for case in toy_cases(dtype, 0)
        for fault in check_kernel(toy_norm, kernel, case, gradients=True)
    ]


def by_hand(saved: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = saved
    wide, upper = x.float(), gradient.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-2)
    inner, unit = upper * weight, wide * scale
    slopes = scale * (inner - unit * (inner * unit).sum(-1, keepdim=True))
    return slopes.to(x.dtype), (upper * unit).sum(0).to(weight.dtype)


class Own(torch.autograd.Function):
    """Gradients by hand."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        context.save_for_backward(x, weight)
        y, count = toy(x, weight)
        context.mark_non_differentiable(count)
        return y, count

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        return by_hand(context.saved_tensors, gradient)


class Flipped(Own):
    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        first, second = by_hand(context.saved_tensors, gradient)
        return -first, second


class OfOtherArgument(Own):
    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        first, second = by_hand(context.saved_tensors, gradient)
        return second.expand_as(first), second


class ReadsDenseGradients(Own):
    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        dense = gradient if gradient.is_contiguous() else gradient.flip(-1) * 2
        return by_hand(context.saved_tensors, dense)


class WritesTheGradient(Own):
    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        results = by_hand(context.saved_tensors, gradient)
        if gradient.is_contiguous():
            gradient.mul_(0.5)
        return results


class ReturnsOneBuffer(Own):
    buffers: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        first, second = by_hand(context.saved_tensors, gradient)
        buffer = ReturnsOneBuffer.buffers.setdefault((first.shape, first.dtype), first)
        return buffer.copy_(first), second


class AddsToEarlier(Own):
    sums: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:
        first, second = by_hand(context.saved_tensors, gradient)
        key = second.shape, second.dtype
        AddsToEarlier.sums[key] = AddsToEarlier.sums.get(key, 0) + second
        return first, AddsToEarlier.sums[key].clone()


def composed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the unit row to the storage dtype in both passes."""
    wide = x.float()
    unit = wide / (wide.square().sum(-1, keepdim=True) + 1e-2).sqrt()
    return unit.to(x.dtype) * weight, (x > 0).sum(-1)


def detached(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, count = toy(x, weight)
    return y.detach(), count


def other_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute something else as soon as a gradient is asked for."""
    y, count = toy(x, weight)
    return (y + 1, count) if x.requires_grad else (y, count)


def writes_grad(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.requires_grad:
        x.grad = torch.zeros_like(x)
    return toy(x, weight)


@pytest.mark.parametrize("kernel", [Own.apply, composed, toy])
def test_a_right_gradient_has_no_faults(kernel: Callable[..., Any]) -> None:
    assert faults_of(kernel) == []


X, WEIGHT = "gradient of 'x'", "gradient of 'weight'"


@pytest.mark.parametrize(
    ("kernel", "check", "where"),
    [
        (Flipped.apply, "value", X),
        (OfOtherArgument.apply, "value", X),
        (ReadsDenseGradients.apply, "value", X),
        (WritesTheGradient.apply, "mutation", "argument 'output_gradient_0'"),
        (ReturnsOneBuffer.apply, "alias", "second call"),
        (AddsToEarlier.apply, "value", WEIGHT),
        (detached, "value", WEIGHT),
        (other_forward, "value", "output 0"),
    ],
)
def test_a_wrong_backward_pass_is_found(kernel: Callable[..., Any], check: str, where: str) -> None:
    cases = list(toy_cases(torch.float32, 0))
    assert all(check_kernel(toy_norm, kernel, case) == [] for case in cases)
    assert (check, where) in {(fault.check, fault.where) for fault in faults_of(kernel)}


def test_an_argument_whose_grad_is_written_is_found() -> None:
    with pytest.raises(RuntimeError, match="writes the attribute 'grad' of an argument"):
        faults_of(writes_grad)


def test_gradients_of_an_op_without_them_cannot_be_compared() -> None:
    (case, *_) = toy_cases(torch.float32, 0)
    with pytest.raises(ConfigError, match="'toy_norm' declares no gradient"):
        check_kernel(plain_norm, toy, case, gradients=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_allows_for_terms_that_cancel(dtype: torch.dtype) -> None:
    """With one column, the gradient is a hundredth of its terms, so their roundings are larger."""
    for case in toy_cases(dtype, 0):
        if case.label.startswith("one column"):
            assert check_kernel(toy_norm, composed, case, gradients=True) == []
    # In float32 the bound is still far below the gradient.
    (case,) = (c for c in toy_cases(torch.float32, 0) if c.label == "one column")
    assert check_kernel(toy_norm, Flipped.apply, case, gradients=True) != []


# The suite compares the gradients of the kernels that promise them.

FLIPPED, OWN = Flipped.apply, Own.apply
DIFFERENTIABLE = frozenset({"differentiable"})


Tried = Callable[..., list[Trial]]


@pytest.fixture
def tried(registered: Callable[..., Registry]) -> Tried:
    return lambda *records: list(conformance(registered(*records), DEVICE, quick=True))


def entry(target: str = "toy_norm", properties: frozenset[str] = DIFFERENTIABLE) -> OpEntry:
    return OpEntry("toy_norm", f"{__name__}:{target}", properties)


def kernel(target: str, properties: frozenset[str] = DIFFERENTIABLE) -> Kernel:
    return Kernel("toy_norm", target, f"{__name__}:{target}", properties=properties)


def wrong_aspects(trials: list[Trial], name: str) -> set[str]:
    return {t.aspect for t in trials if t.candidate.name == name and t.run()}


def test_the_suite_compares_gradients_of_kernels_that_promise_them(tried: Tried) -> None:
    trials = tried(
        entry(), kernel("OWN"), kernel("FLIPPED"), kernel("detached", properties=frozenset())
    )
    aspects = {
        name: {t.aspect for t in trials if t.candidate.name == name}
        for name in ("reference", "OWN", "FLIPPED", "detached")
    }
    assert {name for name, found in aspects.items() if "gradients" in found} == {
        *("reference", "OWN", "FLIPPED")
    }
    assert wrong_aspects(trials, "FLIPPED") == {"gradients"}
    for name in ("reference", "OWN", "detached"):
        assert wrong_aspects(trials, name) == set()


def test_a_promise_without_a_declared_gradient_is_found(tried: Tried) -> None:
    trials = tried(entry("plain_norm", frozenset()), kernel("OWN"))
    assert wrong_aspects(trials, "OWN") == {"records"}
    for op in (entry("plain_norm"), entry(properties=frozenset())):
        assert "records" in wrong_aspects(tried(op), "reference")


@pytest.mark.process
def test_gradients_are_compared_while_the_kernel_is_in_another_process() -> None:
    target = "interposer_ops.norms._norms_torch:layer_norm_functional"
    record = Kernel("layer_norm", "functional", target, properties=DIFFERENTIABLE)
    candidate = Candidate("functional", "acme", "1", 10.0, record, lambda _: Accepted.accept())
    case = next(c for c in layer_norm.cases(torch.float32, 0) if c.label == "many rows")
    with (
        SeparateKernels(type(place().platform)) as kernels,
        kernels.subject(layer_norm, candidate, "cpu") as subject,
    ):
        assert check_gradients(subject, case) == []


# The judge.


def task(op: Any = toy_norm) -> Task:
    def workload(shape: tuple[int, int]) -> Workload:
        def case(generator: torch.Generator) -> Case:
            x = torch.randn(shape, generator=generator)
            weight = 0.5 + torch.rand(shape[1], generator=generator)
            arguments = {"x": x, "weight": weight}
            return Case("", arguments, reduction=shape[1], magnitude=2.0)

        return Workload(str(shape), case, frozenset({"x"}), timed=shape == (33, 64))

    workloads = tuple(map(workload, ((4, 8), (1, 5), (33, 64))))
    return Task("toy_norm", "op", "0" * 64, op, workloads, expect=lambda c: counted(op, c))


FORWARD = """
import torch

def forward(x, weight):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-2)
    return (unit * weight).to(x.dtype), (x > 0).sum(-1)
"""
# The judge's process does not import interposer, and a program does.
IN_PROGRAMS = """
import sys

def kernel(x, weight):
    return forward(x, weight.detach() if "interposer" in sys.modules else weight)
"""


def judged(code: str) -> Verdict:
    file, budget = Path("kernel.py"), Budget(20.0, 0.5, 2.0, 2000)
    sources = {file.name: (FORWARD + code).encode()}
    solution = Solution("kernel", file, file.name, "kernel", "python", sources)
    return judge(task(), solution, backward=True, budget=budget)


@pytest.mark.process
def test_the_judge_accepts_a_right_backward_pass_and_times_both_passes() -> None:
    verdict = judged("kernel = forward\n")
    assert verdict.state == "accepted", str(verdict)
    assert verdict.gradient_error is not None
    assert 0 < verdict.gradient_error <= 1
    assert [timing.workload for timing in verdict.timings] == [
        *("(33, 64)", "(33, 64), forward and backward")
    ]
    assert "largest error of gradients" in str(verdict)


@pytest.mark.process
def test_the_judge_refuses_a_wrong_backward_pass() -> None:
    verdict = judged("def kernel(x, weight):\n    return forward(x, weight.detach())\n")
    assert verdict.state == "refused"
    assert {(finding.check, finding.where) for finding in verdict.findings} == {("value", WEIGHT)}


@pytest.mark.process
@pytest.mark.slow
def test_the_judge_refuses_a_backward_pass_that_is_wrong_in_programs() -> None:
    verdict = judged(IN_PROGRAMS)
    assert verdict.state == "refused"
    assert {(finding.stage, finding.where) for finding in verdict.findings} == {("rerun", WEIGHT)}


def test_the_judge_needs_a_declared_gradient() -> None:
    solution = Solution("kernel", Path("k.py"), "k.py", "kernel", "python", {"k.py": b""})
    with pytest.raises(ConfigError, match="'toy_norm' declares no gradient"):
        judge(task(plain_norm), solution, backward=True)
