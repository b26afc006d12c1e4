"""What torch.compile has a part in is told from what it has not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from interposer import Candidate, Choice, Kernel, LayerEntry, Request, Verdict
from interposer.records import CommunicatorEntry
from interposer_ops.devices.graphs import judge_choices, judge_compilation


class Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Identity()

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.part(torch.zeros(1))
        return out


def step() -> torch.Tensor:
    return torch.zeros(1)


def test_plain_steps_are_accepted() -> None:
    assert judge_compilation(step)
    assert judge_compilation(Step())
    assert judge_compilation(Step().forward)


def test_a_compiled_step_is_refused() -> None:
    compiled_in_place = Step()
    compiled_in_place.compile(backend="eager")
    for compiled in (
        torch.compile(step, backend="eager"),
        torch.compile(Step(), backend="eager"),
        compiled_in_place,
    ):
        assert "the step is compiled by torch.compile" in judge_compilation(compiled).reason


@pytest.mark.parametrize("way", ["in place", "wrapped", "its forward"])
def test_a_compiled_part_is_found(way: str) -> None:
    step = Step()
    if way == "in place":
        step.part.compile(backend="eager")
    elif way == "wrapped":
        step.part = torch.compile(step.part, backend="eager")  # type: ignore[assignment]
    else:
        step.part.forward = torch.compile(  # type: ignore[method-assign]
            step.part.forward, backend="eager"
        )
    assert "a part of the step, is compiled" in judge_compilation(step).reason


@pytest.mark.process
def test_judging_a_step_does_not_import_the_compiler() -> None:
    program = """
import sys, torch
from interposer_ops.devices.graphs import judge_compilation
before = "torch._dynamo" in sys.modules
assert judge_compilation(torch.nn.Linear(2, 2))
assert ("torch._dynamo" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def candidate(op: str, name: str, *properties: str) -> Candidate:
    record = Kernel(op, name, "acme.kernels:run", properties=frozenset(properties))
    return Candidate(name, "acme", "1.0", 10.0, record, lambda _: Verdict.accept())


def chosen(candidate: Candidate) -> Choice:
    assert isinstance(candidate.record, Kernel | LayerEntry)
    kernel = isinstance(candidate.record, Kernel)
    name = (
        candidate.record.op if isinstance(candidate.record, Kernel) else candidate.record.layer_id
    )
    return Choice(Request("kernel" if kernel else "layer", name), candidate, "", ())


WAITS = candidate("linear", "linear_waiting")
STUCK = candidate("scan", "scan_waiting")
SAFE = candidate("linear", "linear_safe", "graph_safe")


def others(request: Request) -> list[Candidate]:
    return [WAITS, SAFE] if request.name == "linear" else [STUCK]


def test_refusals_say_how_to_keep_graphs() -> None:
    assert judge_choices([chosen(SAFE)], others)
    assert judge_choices([chosen(WAITS)], others).reason == (
        "cannot be captured: linear_waiting of acme for 'linear' does not promise to be "
        "graph_safe. Try: Config(require={'graph_safe'})"
    )
    assert judge_choices([chosen(WAITS), chosen(STUCK)], others).reason == (
        "cannot be captured: linear_waiting of acme for 'linear', scan_waiting of acme for 'scan' "
        "do not promise to be graph_safe. Try: a plugin with a graph_safe candidate for 'scan': "
        "there is none here"
    )


def test_sums_over_ranks_have_to_be_safe_as_well() -> None:
    def summing(name: str, *properties: str) -> Candidate:
        record = CommunicatorEntry(name, "acme.sums:Sums", properties=frozenset(properties))
        return Candidate(name, "acme", "1.0", 10.0, record, lambda _: Verdict.accept())

    staged, captured = summing("staged"), summing("captured", "graph_safe")
    request = Request("communicator", "all_reduce")
    assert judge_choices([Choice(request, captured, "", ())], lambda _: [staged, captured])
    verdict = judge_choices([Choice(request, staged, "", ())], lambda _: [staged, captured])
    assert verdict.reason == (
        "cannot be captured: staged of acme for 'all_reduce' does not promise to be graph_safe. "
        "Try: Config(require={'graph_safe'})"
    )


def test_layers_that_wait_for_the_host_are_not_captured() -> None:
    verdict = judge_choices([replace(chosen(SAFE), waits=True), chosen(SAFE)], others)
    assert verdict.reason == (
        "cannot be captured: layers that call 'linear' read numbers on the host in between. "
        "Try: a format of weights that one op computes, or Config(graphs='off')"
    )


def test_a_replacement_layer_must_declare_graph_safe() -> None:
    entry = LayerEntry("norm", "other", "acme.layers:Other")
    safe = LayerEntry("norm", "safe", "acme.layers:Other", properties=frozenset({"graph_safe"}))
    standard = LayerEntry("norm", "standard", "acme.layers:Norm", score=0.0)
    layers = [
        Candidate(record.name, "acme", "1.0", 10.0, record, lambda _: Verdict.accept())
        for record in (entry, safe, standard)
    ]
    verdicts = [judge_choices([chosen(layer), chosen(WAITS)], others) for layer in layers]
    kernel = "linear_waiting of acme for 'linear' does not promise to be graph_safe"
    assert [verdict.reason for verdict in verdicts] == [
        f"cannot be captured: {kernel}, and the layer other of acme for 'norm' has code of its "
        "own, which does not promise to be graph_safe. "
        "Try: Config(require={'graph_safe'}, layers={'norm': 'standard'})",
        *[f"cannot be captured: {kernel}. Try: Config(require={{'graph_safe'}})"] * 2,
    ]
