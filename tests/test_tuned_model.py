"""A real model whose kernels have the wrong scores, before and after tuning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

import interposer
from interposer import Choice, Config, Kernel, Planned, hookimpl, planned
from interposer_engine import SamplingParams, load
from interposer_ops.activations import silu_and_mul
from interposer_tools import tune

MODEL = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
CALLS: list[int] = []
READINGS = count()


def timer() -> float:
    """Return one more second with each reading, and with each call of ``slow``."""
    return float(next(READINGS))


def slow(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(len(x))
    next(READINGS)
    return silu_and_mul(x)


@pytest.fixture(autouse=True)
def _mis_scored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugin = ModuleType("mis_scored")
    record = Kernel("silu_and_mul", "silu_and_mul_slow", "mis_scored:slow", score=1000.0)
    plugin.__dict__.update(slow=slow, interposer_records=hookimpl(lambda: [record]))
    monkeypatch.setitem(sys.modules, "mis_scored", plugin)
    with interposer.register(plugin):
        yield


def choice_of(plan: Planned) -> Choice:
    (choice,) = (
        choice
        for choice, _ in plan.resolver.choices.values()
        if choice.request.name == "silu_and_mul"
    )
    return choice


@pytest.mark.slow
def test_tuning_puts_wrong_scores_right(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path), platform="cpu")
    assert choice_of(planned(MODEL, config)).chosen.name == "silu_and_mul_slow"
    table = tune(MODEL, tokens=(8,), repeats=3, config=config, timer=timer)
    choice = choice_of(planned(MODEL, config))
    assert choice.chosen.name != "silu_and_mul_slow"
    # All but one are as fast as each other, which leaves it to the score.
    assert len(choice.seconds) > 1
    expected = {**dict.fromkeys(choice.seconds, 1.0), "mis_scored/silu_and_mul_slow": 2.0}
    assert choice.seconds == pytest.approx(expected)
    assert "in the measurements of this host" in choice.why
    (slower,) = [r for r in choice.refusals if r.candidate == "silu_and_mul_slow"]
    assert "slower" in slower.reason

    # Everything that a kernel or a backend could be chosen for was timed, and is current.
    explained = interposer.explain(planned(MODEL, config)).to_dict()["choices"]
    assert all("cannot be used" not in str(row) for row in explained)
    assert {entry.key.kind for entry in table.entries} == {"kernel", "attention"}
    assert all(entry.value.failed == {} for entry in table.entries)

    CALLS.clear()
    load(MODEL, config=config, cache_tokens=64).generate("def ", SamplingParams(max_new_tokens=2))
    assert CALLS == []
