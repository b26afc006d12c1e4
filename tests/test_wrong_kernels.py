"""The suite finds out every wrong kernel, says what is wrong, and blames no right one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.wrong_kernels import ALL, Wrong

from interposer import Capability, CustomOp, Device, Kernel, Registry
from interposer.errors import foreign_errors
from interposer.hookspecs import hookimpl
from interposer.records import load_target
from interposer.tooling import Plugins
from interposer_ops import plugin as standard
from interposer_testing import Fault, check_kernel, conformance
from interposer_testing.cases import CaseSpace, PlannedCase, Point, planned_cases

CPU = Device("cpu", "cpu", "test", Capability("x86_64"))
each_wrong = pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)


def op_of(wrong: Wrong) -> CustomOp[..., Any]:
    op: CustomOp[..., Any] = load_target(Registry(Plugins.of(standard)).ops[wrong.op].target)
    return op


def faults_of(wrong: Wrong, plan: PlannedCase) -> list[Fault]:
    try:
        return check_kernel(op_of(wrong), wrong.function, plan.build())
    except foreign_errors() as error:
        return [Fault.raised("call", "call", error)]


def without(axis: str, plans: list[PlannedCase], space: CaseSpace) -> Iterator[PlannedCase]:
    """Yield the cases with the first value of ``axis`` in place of every other."""
    if axis == "dtype":
        yield from (plan for plan in plans if plan.dtype == space.dtypes[0])
        return
    for plan in plans:
        assert plan.point is not None
        base = at_base(plan.point, axis, space)
        if any(base.label == point.label for point in space.points(plan.dtype)):
            build = lambda base=base, plan=plan: space.build(base, plan.dtype, 0)  # noqa: E731
            yield PlannedCase(base.label, plan.dtype, build, base)


def at_base(point: Point, axis: str, space: CaseSpace) -> Point:
    if axis == "layout":
        return replace(point, layout="dense")
    if axis == "special":
        return replace(point, special="ordinary")
    (own,) = (one for one in space.axes if one.name == axis)
    label, value = next(iter(own.values.items()))
    return replace(
        point, labels={**point.labels, axis: label}, values={**point.values, axis: value}
    )


def test_there_are_enough_of_them() -> None:
    assert len({wrong.name for wrong in ALL}) == len(ALL) >= 40


@pytest.mark.landing(20)
@each_wrong
def test_a_wrong_kernel_is_found_out_by_the_quick_suite(wrong: Wrong) -> None:
    module = wrong.function.__module__
    kernel = Kernel(
        wrong.op, f"{wrong.op}_wrong", f"{module}:{wrong.name}", properties=wrong.properties
    )
    author = SimpleNamespace(__name__="author", interposer_records=hookimpl(lambda: [kernel]))
    registry = Registry(Plugins.of(standard, author))
    faults: list[Fault] = []
    for trial in conformance(registry, CPU, op=wrong.op, quick=True):
        if trial.candidate.record == kernel and trial.aspect == wrong.aspect:
            faults += trial.run()
        said = any(wrong.says in str(fault) for fault in faults)
        if said and {fault.check for fault in faults} & wrong.checks:
            return
    pytest.fail(f"found out for nothing of that: {faults}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [wrong for wrong in ALL if wrong.axis], ids=lambda wrong: wrong.name
)
def test_no_other_axis_would_find_it(wrong: Wrong) -> None:
    op = op_of(wrong)
    assert isinstance(op.cases, CaseSpace)
    plans = list(planned_cases(op, seed=0, quick=True))
    assert any(faults_of(wrong, plan) for plan in plans)
    for plan in without(wrong.axis, plans, op.cases):
        assert faults_of(wrong, plan) == [], plan.label


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "wrong", [wrong for wrong in ALL if wrong.aspect != "numerics"], ids=lambda wrong: wrong.name
)
def test_a_broken_promise_shows_in_no_number(wrong: Wrong) -> None:
    for plan in planned_cases(op_of(wrong), seed=0, quick=True):
        assert faults_of(wrong, plan) == [], plan.label
