"""Requests state what operands are: what the cases of an op try, a kernel can ask for or refuse."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests import stream_norm

from interposer import (
    BoundKernel,
    Case,
    Config,
    CustomOp,
    Request,
    Resolver,
    Site,
    current_registry,
    explain,
    place,
    register,
)
from interposer.records import SchemeEntry, load_target
from interposer.tooling import Row
from interposer_engine import load
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.norms import fused_add_rms_norm
from interposer_testing import verify
from interposer_testing.cases import CaseSpace

MODEL = Path(__file__).parents[1] / "examples/models/stdlib-lm"
DOCS = Path(__file__).parents[1] / "docs"
OPS: dict[str, CustomOp[..., Any]] = {
    name: load_target(entry.target)
    for name, entry in current_registry(Config()).ops.items()
    if entry.target.startswith("interposer_")
}
STREAMS: tuple[dict[str, int | float | str | bool], ...] = (
    {"hidden_size": 64, "residual_dtype": "float32"},
    {"hidden_size": 64, "residual_dtype": "bfloat16"},
    {"hidden_size": 64},
)
NAME = "fused_add_rms_norm_stream"
Tried = tuple[CustomOp[..., Any], list[Case]]
# It says that an embedding shares the weight, which is nothing that a call shows.
SHARED = "tied"


@pytest.fixture(scope="module", params=list(OPS.values()), ids=list(OPS))
def tried(request: pytest.FixtureRequest) -> Tried:
    op: CustomOp[..., Any] = request.param
    return op, plain_cases(op)


def properties(value: object) -> Iterator[tuple[str, object]]:
    """Yield the properties of an argument that a kernel might refuse, except sizes and numbers."""
    yield "absent", value is None
    if isinstance(value, torch.Tensor):
        yield "dtype", value.dtype
        yield "rank", value.ndim
        yield "gaps", not value.is_contiguous()
    elif isinstance(value, bool | str | torch.dtype):
        yield "option", value


def stated(case: Case) -> frozenset[tuple[str, object]]:
    """Return the dims of a request that are not sizes, as sizes say nothing of these."""
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


def test_varying_arguments_are_stated_or_declared(tried: Tried) -> None:
    op, cases = tried
    seen: dict[tuple[str, str], dict[Any, set[object]]] = defaultdict(lambda: defaultdict(set))
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


@pytest.mark.landing(35)
def test_a_sample_matches_its_dims(tried: Tried) -> None:
    op, cases = tried
    if op.sample is None:
        return
    free = declared(op)
    for dims, like in {stated(case): case for case in cases}.items():
        drawn = op.sample(narrow(op), like.dims, 3, 0)
        assert stated(drawn) == dims
        for name, value in drawn.arguments.items():
            given = dict(properties(value))
            for kind, wanted in properties(like.arguments[name]):
                if kind != "gaps" and (name, kind) not in free:
                    assert given.get(kind) == wanted, f"{op.name}: {kind} of {name} for {like.dims}"


@pytest.mark.landing(50)
def test_the_definition_names_the_dims_of_its_cases(tried: Tried) -> None:
    op, cases = tried
    told = re.search(r"Dims[^:]*: (those of ``(\w+)``)?(.*?)(\n    [A-Z]\w+:|\Z)", text(op), re.S)
    assert told, f"{op.name}: no section 'Dims:'"
    words = set(re.findall(r"\w+", text(OPS[told[2]]) if told[2] else told[3]))
    dims = set[str]().union(*(case.dims for case in cases))
    assert dims <= words, f"{op.name}: {dims - words} are not told"
    named = {word for word in words if "_" in word} - {*op.signature.parameters, *OPS}
    assert named <= dims, f"{op.name}: {named - dims} are not stated"


def text(op: CustomOp[..., Any]) -> str:
    return op.__doc__ or ""


def requests_of(rows: Iterable[Row]) -> list[Request]:
    asked = (row.choice.request for row in rows)
    return [request for request in asked if request.kind == "kernel"]


@cache
def known_dims(op: str) -> set[str]:
    """Return the dims that the first case of an op states."""
    space, dtype = space_of(OPS[op]), narrow(OPS[op])
    return set(space.build(space.points(dtype)[0], dtype, 0).dims)


def assert_stated_as_in_cases(asked: Iterable[Request]) -> None:
    """Hold that requests state exactly what the cases of their ops do."""
    for request in asked:
        known = known_dims(request.name)
        assert set(request.dims) - {SHARED} == known - {SHARED}, str(request)


def test_the_requests_of_a_model_state_the_same_dims_as_cases() -> None:
    asked = requests_of(explain(MODEL, config=Config()).rows)
    assert len(asked) > 5
    assert_stated_as_in_cases(asked)


@pytest.mark.parametrize("provider", ["interposer-quantization", "interposer-nf4"])
def test_the_requests_of_every_scheme_state_the_same_dims_as_cases(provider: str) -> None:
    registry, device = current_registry(Config()), place().device
    asked: dict[str, Request] = {}
    for plugin, record in registry.records(SchemeEntry):
        if plugin.source.origin.startswith(provider) and record.examples:
            for settings in load_target(record.examples)().values():
                scheme = load_target(record.target).parse(settings)
                resolver = Resolver(registry, device, Config(canary="off"), scheme)
                site = Site(resolver, "model.layers.0.self_attn.q_proj", torch.bfloat16)
                with torch.device("meta"):
                    Linear(site, 512, 96)
                    Linear(site, 512, 96, bias=True)
                choices = (choice for choice, _ in resolver.choices.values())
                asked |= {str(c.request): c.request for c in choices if c.request.kind == "kernel"}
    assert {request.dims.get("biased") for request in asked.values()} >= {False, True}
    assert_stated_as_in_cases(asked.values())


class Calls:
    """Records the arguments of every bound kernel by the request that it was bound for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Request, Mapping[str, Any]]] = []
        bind, bind_table = Resolver.kernel, cast(Any, Resolver.table)

        def kernel(resolver: Resolver, op: CustomOp[..., Any], *rest: Any) -> BoundKernel[..., Any]:
            return self.watched(op, bind(resolver, op, *rest))

        def table(resolver: Resolver, *given: Any) -> tuple[BoundKernel[..., Any], ...]:
            bound = bind_table(resolver, *given)
            return tuple(self.watched(g[0], b) for g, b in zip(given, bound, strict=False))

        monkeypatch.setattr(Resolver, "kernel", kernel)
        monkeypatch.setattr(Resolver, "table", table)

    def watched(
        self, op: CustomOp[..., Any], bound: BoundKernel[..., Any]
    ) -> BoundKernel[..., Any]:
        def call(*given: Any) -> Any:
            arguments = op.signature.bind(*given)
            arguments.apply_defaults()
            self.found.append((bound.choice.request, arguments.arguments))
            return bound.function(*given)

        return BoundKernel(call, bound.prepare, bound.choice, bound.restore)


@pytest.mark.landing(1)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_passes_arguments_that_match_its_requests(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    # References take constants as they are stored; kernels may have prepared them.
    config = Config(kernels=dict.fromkeys(OPS, "reference"))
    lm = load(MODEL, config=config, dtype="bfloat16", quantization=quantization)
    list(lm.generate(["import os"], max_new_tokens=2, temperature=0.5, presence_penalty=0.5))
    asked = {str(request): (request, arguments) for request, arguments in calls.found}
    assert {"apply_penalties", "sample_tokens"} <= {request.name for request, _ in asked.values()}
    for request, arguments in asked.values():
        op = OPS[request.name]
        if request.dtype != "bfloat16":
            continue  # as the logits after penalties
        told = {n: v for n, v in request.dims.items() if isinstance(v, bool | str) and n != SHARED}
        alike = [case for case in plain_cases(op) if told.items() <= case.dims.items()]
        for name, value in arguments.items():
            for kind, passed in properties(value):
                tried = {dict(properties(case.arguments[name])).get(kind) for case in alike}
                if kind == "gaps":
                    assert not passed or name in space_of(op).strided, f"{request}: {name}"
                elif (name, kind) not in declared(op):
                    assert passed in tried, f"{request}: {kind} of {name} is {passed}"


def test_the_documentation_has_the_dims_that_cases_state() -> None:
    page = (DOCS / "write-a-kernel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`[,; ]*)+)", page, re.M)
    told = {name: set(re.findall(r"\w+", dims)) for name, dims in rows if name in OPS}
    assert len(told) > 8
    for name, dims in told.items():
        assert dims - {SHARED} == {*plain_cases(OPS[name])[0].dims} - {SHARED}, name


def test_a_kernel_that_takes_one_dtype_of_the_residual_is_chosen_for_that_alone() -> None:
    with register(stream_norm):
        resolver = Resolver(current_registry(), place().device, Config())
        chosen = [
            resolver.kernel(fused_add_rms_norm, torch.bfloat16, dims, "norm").choice
            for dims in STREAMS
        ]
        layer = RMSNorm(Site(resolver, "model.norm", torch.bfloat16), 64, 1e-6)
    assert layer.add_norm is stream_norm.add_norm
    assert chosen[0].chosen.name == NAME
    refusals = [
        refusal.reason
        for choice in chosen[1:]
        for refusal in choice.refusals
        if refusal.candidate == NAME
    ]
    assert refusals == [
        "residual_dtype is 'bfloat16', must be one of ['float32']",
        "needs to know residual_dtype, which the request does not state",
    ]


def test_a_kernel_is_verified_on_the_cases_that_it_asks_for() -> None:
    with register(stream_norm):
        report = verify(stream_norm.__name__, op="fused_add_rms_norm", quick=True)
    assert report.state == "correct", str(report)
    (candidate,) = [c for c in report.candidates if not c.is_declaration]
    assert candidate.dtypes == ("float32", "bfloat16")
