"""Adapted tiny models of the architectures of transformers: the judge, the table, and samples."""

from __future__ import annotations

import importlib
import json
import math
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


def test_the_table_lists_what_transformers_has(table: dict[str, dict[str, Any]]) -> None:
    head = TABLE.read_text(encoding="utf-8").partition("\n")[0]
    assert f"transformers {transformers.__version__}," in head
    classes = module("tiny_models.building").model_classes()
    assert {row["model_type"]: row["class_name"] for row in table.values()} == classes


def test_the_table_keeps_what_is_promised(table: dict[str, dict[str, Any]]) -> None:
    run = [row for row in table.values() if row["status"] != "not run"]
    assert len(run) >= 300
    assert {row["status"] for row in run} == {"adapted"}
    for kind in module("tiny_models.modules").KINDS:
        bound, instances = (
            sum(row[of][kind] for row in run) for of in ("bound_modules", "modules")
        )
        assert bound >= 0.95 * instances, kind


def test_the_page_has_the_figures_of_the_table(table: dict[str, dict[str, Any]]) -> None:
    row_of, summary_of = module("tiny_models.judge").Row, module("tiny_models.table").Summary
    summary = summary_of.of(row_of(**row) for row in table.values())
    page = (ROOT / "docs" / "adapted-architectures.md").read_text(encoding="utf-8")
    assert f"Of {summary.types} architectures {summary.run} run" in page
    assert f"{summary.adapted} of them" in page
    for kind in module("tiny_models.modules").KINDS:
        bound, instances = summary.bound[kind], summary.instances[kind]
        assert f"| {kind} | {bound} | {instances} | {summary.share(kind):.1f} % |" in page


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LONG else ()) for kind in SAMPLE],
)
def test_a_sample_is_adapted(kind: str, table: dict[str, dict[str, Any]]) -> None:
    rows = judged(*SAMPLE[kind].split())
    assert {row["status"] for row in rows} == {"adapted"}
    check(rows, table)


@pytest.mark.slow
def test_half_precision_is_adapted() -> None:
    rows = judged(*HALF, "--dtype", "bfloat16")
    assert [row["model_type"] for row in rows] == HALF
    assert [(row["model_type"], row["reason"]) for row in rows if row["status"] != "adapted"] == []
    assert {row["dtype"] for row in rows} == {"bfloat16"}


def test_the_sample_has_forty() -> None:
    names = " ".join(SAMPLE.values()).split()
    assert (len(names), len(set(names))) == (40, 40)


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


def test_a_right_adapter_is_judged_right() -> None:
    row = judge(right)
    assert (row.status, row.reason) == ("adapted", "")
    assert row.bound_modules == {"Linear": 1, "LayerNorm": 1, "RMSNorm": 0}
    assert row.modules == {"Linear": 13, "LayerNorm": 5, "RMSNorm": 0}
    assert sum(row.unbound.values()) == 16
    assert 0 < row.bound < 1e-2


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
from tiny_models.processes import judge_apart
row = judge_apart("bert", "BertModel", lambda model: os.abort())
print(row.model_type, row.status, row.reason)
"""


def test_a_crash_is_a_row() -> None:
    # Not in a fork of this process, whose threads and handlers of signals other tests left.
    done = forks().run("-c", CRASH)
    assert done.stdout == "bert crashed SIGABRT\n", done.stderr


def test_what_cannot_be_built_says_why() -> None:
    row = module("tiny_models.judge").judge("bert", "NoSuchModel", right)
    assert row.status == "not run"
    assert "NoSuchModel" in row.reason


class Scaled(nn.Module):
    """Divides rows by a length, and multiplies them."""

    def __init__(self, power: int, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.power, self.offset = power, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.abs().pow(self.power).mean(-1, keepdim=True).pow(1 / self.power)
        return x / (length + 1e-6) * (self.weight + self.offset)


@pytest.mark.parametrize(
    ("candidate", "is_norm"),
    [
        (Scaled(2, 0.0), True),
        (Scaled(2, 1.0), True),
        (Scaled(2, 0.5), False),
        (Scaled(1, 0.0), False),
        (nn.RMSNorm(16), True),
        (nn.RMSNorm(16, elementwise_affine=False), False),
        (nn.LayerNorm(16), False),
        (nn.Linear(16, 16), False),
        (nn.ReLU(), False),
        (nn.Identity(), False),
    ],
)
def test_numbers_tell_a_root_mean_square_norm(candidate: nn.Module, is_norm: bool) -> None:
    assert module("tiny_models.modules").is_rms_norm(candidate) is is_norm


def test_the_noise_is_that_of_the_ops() -> None:
    numerics = module("tiny_models.numerics")
    linear = nn.Linear(32, 8)
    model = nn.Sequential(linear)
    inputs = {"input": torch.randn(4, 32)}
    exact = numerics.run(model, inputs)
    (largest,) = numerics.allowed(model, inputs, set(), exact, draws=20).values()
    weight, bias = linear.weight.detach().abs(), linear.bias.detach().abs()
    terms = float((inputs["input"].abs() @ weight.T + bias).max())
    single = torch.finfo(torch.float32).eps
    # Two roundings of the product with its bias, and one for each of 33 additions, of u each.
    bound = 2 * single / 2 * terms + 33 * single * terms
    assert 0.5 * bound < largest <= 1.01 * bound
    assert numerics.equal(numerics.run(model, inputs), exact), "the noise stays"


def test_outputs_that_cannot_be_compared_are_infinitely_apart() -> None:
    distance = module("tiny_models.numerics").distance
    ones = torch.ones(2)
    assert distance(ones, ones.double()) == math.inf
    assert distance(ones, torch.ones(3)) == math.inf
    assert distance(ones, torch.tensor([1.0, math.nan])) == math.inf
    assert distance(torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 2.5])) == 0.5
    assert distance(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.0


def test_a_table_is_read_as_it_was_written() -> None:
    row_of, table_of = module("tiny_models.judge").Row, module("tiny_models.table")
    counts = {"Linear": 13, "LayerNorm": 5, "RMSNorm": 0}
    rows = [
        row_of("bert", "BertModel", status="adapted", call="text, image 4d", modules=counts,
               bound_modules={**counts, "Linear": 12}, unbound={"Linear (Odd): no op": 1}),
        row_of("oddity", "OddModel", status="differs", call="text", modules=counts,
               bound_modules=counts, reason="by far"),
        row_of("wrong", "WrongModel", reason="building: ValueError: it wants\nmore"),
    ]  # fmt: skip
    text = table_of.render(rows, {"transformers": "5.0", "dtype": "float32"})
    assert text.startswith("transformers 5.0, dtype float32\n")
    assert "3 model types, 2 of which run" in text
    assert "25 of 26 Linear instances bound (96.2 %)" in text
    assert "oddity  # differs: by far" in text
    assert "wrong  WrongModel  # building: ValueError: it wants\n" in text
    assert [
        (row["model_type"], row["class_name"], row["status"], row.get("bound_modules"))
        for row in table_of.parse(text)
    ] == [
        ("bert", "BertModel", "adapted", {**counts, "Linear": 12}),
        ("oddity", "OddModel", "differs", counts),
        ("wrong", "WrongModel", "not run", None),
    ]


def test_rows_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    kept = tmp_path / "rows.jsonl"
    row_of = module("tiny_models.judge").Row
    odd = row_of("bert", "BertModel", status="differs", reason="of another day", modules={})
    kept.write_text(json.dumps(odd.as_dict()) + "\n", encoding="utf-8")
    table = tmp_path / "table.txt"
    assert judged("bert", "--rows", str(kept), "--table", str(table)) == []
    assert "bert  # differs: of another day" in table.read_text(encoding="utf-8")
