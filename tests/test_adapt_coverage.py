"""Adapted tiny models of the architectures of transformers: the judge, the table, and samples."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.forks import forks
from torch import nn

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
TABLE = BENCHMARKS / "results" / "adapt_coverage.txt"
# Of each kind of architecture some that differ: in norms, positions, caches, biases, experts,
# convolutions and what attends to what.
SAMPLE = {
    "decoders": "bloom falcon gemma3_text glm4 gpt2 gpt_neox gptj llama olmo2 opt phi qwen3",
    "mixtures and hybrids": "deepseek_v3 gpt_oss mixtral falcon_h1 jamba lfm2 mamba2 qwen3_next",
    "encoders": "albert bert deberta-v2 layoutlmv3 modernbert bart t5 xlnet patchtst",
    "images, sound and several": (
        "convnext resnet swin vit sam wav2vec2 whisper clip llava gemma3 qwen2_5_vl"
    ),
}
LONG = {"encoders", "images, sound and several", "mixtures and hybrids"}
HALF = ["llama", "gemma3_text", "bert", "t5", "whisper", "mixtral"]
CHUNKS = 12
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def table() -> dict[str, dict[str, Any]]:
    rows = module("tiny_models.table").parse(TABLE.read_text(encoding="utf-8"))
    return {row["model_type"]: row for row in rows}


def judged(*arguments: str) -> Rows:
    """Return the rows that the command prints."""
    done = forks().run(BENCHMARKS / "adapt_coverage.py", *arguments, timeout=1200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_almost_all_bound(rows: Rows) -> None:
    for kind in module("tiny_models.modules").KINDS:
        bound, instances = (
            sum(row[of][kind] for row in rows) for of in ("bound_modules", "modules")
        )
        assert bound >= 0.95 * instances, kind


def check(rows: Rows, table: dict[str, dict[str, Any]]) -> None:
    """Compare rows with those of the table: no less may be bound, kind by kind."""
    pairs = [(row, table[row["model_type"]]) for row in rows]
    # What the table lists as not run lacked a package, which somebody may have installed.
    further = [row for row, known in pairs if known["status"] == "not run" != row["status"]]
    assert {row["status"] for row in further} <= {"adapted"}
    pairs = [(row, known) for row, known in pairs if row not in further]
    assert [row["status"] for row, _ in pairs] == [known["status"] for _, known in pairs]
    run = [pair for pair in pairs if pair[0]["status"] != "not run"]
    assert [row["modules"] for row, _ in run] == [row["modules"] for _, row in run]
    for kind in module("tiny_models.modules").KINDS:
        found, listed = (sum(pair[at]["bound_modules"][kind] for pair in run) for at in (0, 1))
        assert found >= listed, kind


@pytest.mark.slow
def test_the_table_lists_every_class_of_transformers(table: dict[str, dict[str, Any]]) -> None:
    head = TABLE.read_text(encoding="utf-8").partition("\n")[0]
    assert f"transformers {transformers.__version__}," in head
    classes = module("tiny_models.building").model_classes()
    assert {row["model_type"]: row["class_name"] for row in table.values()} == classes


@pytest.mark.slow
def test_the_table_keeps_what_is_promised(table: dict[str, dict[str, Any]]) -> None:
    run = [row for row in table.values() if row["status"] != "not run"]
    assert len(run) >= 300
    assert {row["status"] for row in run} == {"adapted"}
    assert_almost_all_bound(run)


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_table(table: dict[str, dict[str, Any]]) -> None:
    row_of, summary_of = module("tiny_models.judge").Row, module("tiny_models.table").Summary
    summary = summary_of.of(row_of(**row) for row in table.values())
    page = " ".join((ROOT / "docs" / "adapt.md").read_text(encoding="utf-8").split())
    assert f"Of the {summary.types} architectures" in page
    assert f"{summary.run} run as small random models" in page
    assert f"all {summary.adapted} of them were adapted" in page


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LONG else ()) for kind in SAMPLE],
)
def test_a_sample_is_adapted(kind: str) -> None:
    names = SAMPLE[kind].split()
    rows = judged(*names)
    assert [(row["model_type"], row["status"]) for row in rows] == [
        (name, "adapted") for name in names
    ]
    assert_almost_all_bound(rows)


@pytest.mark.process
@pytest.mark.slow
def test_half_precision_is_adapted() -> None:
    rows = judged(*HALF, "--dtype", "bfloat16")
    assert [row["model_type"] for row in rows] == HALF
    assert [(row["model_type"], row["reason"]) for row in rows if row["status"] != "adapted"] == []
    assert {row["dtype"] for row in rows} == {"bfloat16"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_are_as_the_table_says(chunk: int, table: dict[str, dict[str, Any]]) -> None:
    check(judged(*sorted(table)[chunk::CHUNKS]), table)


# The judge is tried with adapters that are wrong, so that it is known to notice.


class Handle:
    """Stands for an adapted model whose modules in ``forwards`` run on something else."""

    def __init__(self, model: nn.Module, forwards: dict[str, Callable[..., Any]]) -> None:
        self.modules: dict[str, Any] = {name: model.get_submodule(name) for name in forwards}
        self.places = [SimpleNamespace(name=name, is_bound=True, reason="") for name in forwards]
        for name, forward in forwards.items():
            self.modules[name].forward = forward

    def restore(self) -> None:
        for bound in self.modules.values():
            del bound.forward


LINEAR = "encoder.layer.0.attention.self.query"
NORM = "encoder.layer.1.output.LayerNorm"


def right(model: Any) -> Handle:
    linear, norm = model.get_submodule(LINEAR), model.get_submodule(NORM)
    return Handle(
        model,
        {
            LINEAR: lambda x: x @ linear.weight.T + linear.bias,
            NORM: lambda x: type(norm).forward(norm, x),
        },
    )


def without_bias(model: Any) -> Handle:
    linear = model.get_submodule(LINEAR)
    return Handle(model, {LINEAR: lambda x: x @ linear.weight.T})


def in_half(model: Any) -> Handle:
    linear = model.get_submodule(LINEAR)
    return Handle(
        model, {LINEAR: lambda x: (x.bfloat16() @ linear.weight.T.bfloat16() + linear.bias).float()}
    )


def failing(model: Any) -> Handle:
    return Handle(model, {LINEAR: lambda x: x @ x})


class Keeping(Handle):
    def restore(self) -> None:
        pass


class Spoiling(Handle):
    def restore(self) -> None:
        super().restore()
        with torch.no_grad():
            self.modules[LINEAR].weight[3, 4] += 1e-6


def keeping(model: Any) -> Handle:
    return Keeping(model, {NORM: right(model).modules[NORM].forward})


def spoiling(model: Any) -> Handle:
    linear = model.get_submodule(LINEAR)
    return Spoiling(model, {LINEAR: lambda x: x @ linear.weight.T + linear.bias})


def refusing(model: Any) -> Handle:
    raise ValueError("not this one")


def judge(adapt: Callable[[Any], Handle]) -> Any:
    return module("tiny_models.judge").judge("bert", "BertModel", adapt)


@pytest.mark.slow
def test_a_right_adapter_is_judged_right() -> None:
    row = judge(right)
    assert (row.status, row.reason) == ("adapted", "")
    assert row.bound_modules == {"Linear": 1, "LayerNorm": 1, "RMSNorm": 0}
    assert row.modules == {"Linear": 13, "LayerNorm": 5, "RMSNorm": 0}
    assert sum(row.unbound.values()) == 16
    assert 0 < row.bound < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapt", "status", "reason"),
    [
        (without_bias, "differs", f"{LINEAR} is "),
        (in_half, "differs", f"{LINEAR} is "),
        (failing, "fails", "mat1 and mat2|size"),
        (refusing, "fails", "ValueError: not this one"),
        (keeping, "not restored", "forwards are left"),
        (spoiling, "not restored", "weights differ"),
    ],
)
def test_a_wrong_adapter_is_judged_wrong(
    adapt: Callable[[Any], Handle], status: str, reason: str
) -> None:
    row = judge(adapt)
    assert row.status == status
    assert any(part in row.reason for part in reason.split("|")), row.reason


CRASH = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from tiny_models.judge import judge_apart
row = judge_apart("bert", "BertModel", lambda model: os.abort())
print(row.model_type, row.status, row.reason)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_crash_is_a_row() -> None:
    # Not in a fork of this process, whose threads and handlers of signals other tests left.
    done = forks().run("-c", CRASH)
    assert done.stdout == "bert crashed SIGABRT\n", done.stderr
