"""Requests state what operands are: what the cases of an op try, a kernel can ask for or refuse."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interposer import Case, Config, CustomOp, Request, current_registry, explain
from interposer.records import load_target
from interposer_testing.cases import CaseSpace

MODEL = Path(__file__).parents[1] / "examples/models/stdlib-lm"
OPS: dict[str, CustomOp[..., Any]] = {
    name: load_target(entry.target)
    for name, entry in current_registry(Config()).ops.items()
    if entry.target.startswith("interposer_")
}
# It says that an embedding shares the weight, which is nothing that a call shows.
SHARED = "tied"
each_op = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items()])


def properties(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a kernel might not take of an argument; sizes and numbers are none of it."""
    yield "absent", value is None
    if isinstance(value, torch.Tensor):
        yield "dtype", value.dtype
        yield "rank", value.ndim
        yield "gaps", not value.is_contiguous()
    elif isinstance(value, bool | str | torch.dtype):
        yield "option", value


def stated(case: Case) -> frozenset[tuple[str, object]]:
    """Return what a request tells apart besides sizes, which tell nothing of these properties."""
    return frozenset((n, v) for n, v in case.dims.items() if isinstance(v, bool | str))


def space_of(op: CustomOp[..., Any]) -> CaseSpace:
    assert isinstance(op.cases, CaseSpace)
    return op.cases


def narrow(op: CustomOp[..., Any]) -> torch.dtype:
    """Return a dtype in which operands of others can be told from those of the request's."""
    dtypes = space_of(op).dtypes
    return torch.bfloat16 if torch.bfloat16 in dtypes else dtypes[0]


def plain_cases(op: CustomOp[..., Any]) -> list[Case]:
    """Return cases with every value of every axis that is the op's own."""
    space, dtype = space_of(op), narrow(op)
    points = {point.label: point for point in space.covering(dtype)}
    # What is absent of an ordinary case can have as many dimensions as the others.
    more = (p for p in space.points(dtype) if "three dimensions" in p.labels.values())
    points |= {point.label: point for point in more}
    ordinary = [p for p in points.values() if (p.layout, p.special) == ("dense", "ordinary")]
    return [space.build(point, dtype, 0) for point in ordinary]


def declared(op: CustomOp[..., Any]) -> set[tuple[str, str]]:
    """Return the properties that every kernel has to take, by argument."""
    space = space_of(op)
    found = {(name, str(kind)) for name, kinds in space.varying.items() for kind in kinds}
    return found | {(name, "rank") for name, kind in space.strided.items() if kind == "leading"}


@each_op
def test_what_varies_between_calls_is_stated_or_declared(op: CustomOp[..., Any]) -> None:
    seen: dict[tuple[str, str], dict[Any, set[object]]] = defaultdict(lambda: defaultdict(set))
    cases = plain_cases(op)
    for case in cases:
        for name, value in case.arguments.items():
            for kind, found in properties(value):
                seen[name, kind][stated(case)].add(found)
    varying = {place for place, found in seen.items() if any(len(v) > 1 for v in found.values())}
    # Memory with gaps is declared as what the space may lay out, and is tried with that.
    strided = space_of(op).strided
    gaps = {place for place in varying if place[1] == "gaps" and place[0] in strided}
    unstated = varying - gaps
    assert unstated == declared(op), f"{op.name}: a dim has to state it, or CaseSpace.varying"


@each_op
def test_a_sample_has_what_its_dims_state(op: CustomOp[..., Any]) -> None:
    if op.sample is None:
        return
    free = declared(op)
    for dims, like in {stated(case): case for case in plain_cases(op)}.items():
        drawn = op.sample(narrow(op), like.dims, 3, 0)
        assert stated(drawn) == dims
        for name, value in drawn.arguments.items():
            given = dict(properties(value))
            for kind, wanted in properties(like.arguments[name]):
                if kind != "gaps" and (name, kind) not in free:
                    assert given.get(kind) == wanted, f"{op.name}: {kind} of {name} for {like.dims}"


@each_op
def test_the_definition_names_the_dims_of_its_cases(op: CustomOp[..., Any]) -> None:
    told = re.search(r"Dims[^:]*: (those of ``(\w+)``)?(.*?)(\n    [A-Z]\w+:|\Z)", text(op), re.S)
    assert told, f"{op.name}: no section 'Dims:'"
    words = set(re.findall(r"\w+", text(OPS[told[2]]) if told[2] else told[3]))
    for case in plain_cases(op)[:1]:
        assert case.dims.keys() <= words, f"{op.name}: {case.dims.keys() - words}"


def text(op: CustomOp[..., Any]) -> str:
    return op.__doc__ or ""


def requests_of(**options: Any) -> list[Request]:
    asked = [row.choice.request for row in explain(MODEL, config=Config(), **options).rows]
    return [request for request in asked if request.kind == "kernel"]


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_a_request_states_dims_that_the_cases_have(quantization: str | None) -> None:
    asked = requests_of(quantization=quantization)
    assert len(asked) > 5
    for request in asked:
        known = set(plain_cases(OPS[request.name])[0].dims)
        assert set(request.dims) - {SHARED} == known - {SHARED}, str(request)
