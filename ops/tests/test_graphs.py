"""What torch.compile has a part in is told from what it has not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from interposer_ops.devices.graphs import judge_compilation


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
    whole = Step()
    if way == "in place":
        whole.part.compile(backend="eager")
    elif way == "wrapped":
        whole.part = torch.compile(whole.part, backend="eager")  # type: ignore[assignment]
    else:
        whole.part.forward = torch.compile(  # type: ignore[method-assign]
            whole.part.forward, backend="eager"
        )
    assert "a part of the step, is compiled" in judge_compilation(whole).reason


def test_the_compiler_is_not_imported_to_ask() -> None:
    program = """
import sys, torch
from interposer_ops.devices.graphs import judge_compilation
before = "torch._dynamo" in sys.modules
assert judge_compilation(torch.nn.Linear(2, 2))
assert ("torch._dynamo" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
