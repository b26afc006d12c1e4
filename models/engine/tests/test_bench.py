"""``interposer bench``, and the rooflines that it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.adapter_files import write_adapter
from tests.commands import Command

from interposer_engine import plan
from interposer_engine._bench.kinds import Kind, Sample, Step
from interposer_engine._bench.report import Row
from interposer_engine.roofline import Mixing, ModelWork, Roofs

TINY = ("--prompt", "24", "--contexts", "1,16", "--new-tokens", "8", "--batch", "3")
QUICK = (*TINY, "--rounds", "2", "--read-mib", "1")
ROOFS = Roofs(1e9, "a copy", 1e12, 1)


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(command: Command) -> Bench:
    return partial(command, "bench")


def test_json_has_a_row_for_each_kind(bench: Bench, llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (96, 64)})
    more = ("--adapter", adapter, "--shared-prefix", "100", "--speculate", "ngram")
    code, out, err = bench(llama, *QUICK, *more, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert list(report) == [
        *("version", "model", "platform", "device", "dtype", "quantization", "rounds", "weights"),
        *("weight_bytes", "load_s", "peak_memory_bytes", "roofs", "rows", "notes"),
    ]
    assert (report["version"], report["rounds"], report["weights"]) == (1, 2, 3 * 30720 + 256 * 64)
    rows = {row["name"]: row for row in report["rows"]}
    assert {name: row["test"] for name, row in rows.items()} == {
        "prefill": "pp24",
        "decode_1": "tg8",
        "decode_16": "tg8 @ d16",
        "batch_3": None,
        "extend": "pp24 @ d48",
        "mixed": None,
        "prefix_new": None,
        "prefix_known": None,
        "decode_1_adapter": None,
        "batch_3_adapter": None,
        "repeats": None,
        "repeats_guessed": None,
    }
    for name, row in rows.items():
        assert list(row) == [
            *("name", "what", "test", "tokens_per_second", "p95_between_tokens_s"),
            *("ceiling_tokens_per_second", "reached", "held_by", "seconds", "beside", "ratio"),
        ]
        rate, seconds = row["tokens_per_second"], row["seconds"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
        assert 0 < seconds["host"] < seconds["run"]
        assert (row["ratio"] is None) == (row["beside"] is None)
        # The number of accepted draft tokens is unknown, so this row has no roofline.
        assert (row["ceiling_tokens_per_second"] is None) == (name == "repeats_guessed")
        assert (row["p95_between_tokens_s"] is None) == (name != "mixed")
    # How much faster a known prefix is depends on what else the machine does.
    assert rows["prefix_known"]["ratio"] > 0
    seconds_cached, seconds_new = (
        rows[n]["seconds"]["arithmetic"] for n in ("prefix_known", "prefix_new")
    )
    assert seconds_cached < 0.25 * seconds_new


def test_table_and_drawings_have_the_same_rows(bench: Bench, llama: Path, tmp_path: Path) -> None:
    svg = tmp_path / "rows.svg"
    code, out, err = bench(llama, *QUICK, "--contexts", "9999", "--plot", "--svg", svg)
    assert code == 0, err
    table, _, plot = out.partition("note: a context is cut from 9999 to 503: the context is 512")
    names = ("prefill of 24", "decode, context 503", "batch of 3", "95 % of gaps within")
    assert [name for name in names if name not in table] == []
    assert plot.count("▏") >= 5
    root = ElementTree.parse(svg).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"prefill of 24", "decode of 4, prompts of 24 join"} <= drawn


def test_llama_bench_rows_have_its_format(bench: Bench, llama: Path) -> None:
    code, out, err = bench(llama, *QUICK, "--llama-bench", "--quantization", "fp8")
    assert code == 0, err
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert lines[0] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert [line[5] for line in lines[2:]] == ["pp24", "tg8", "tg8 @ d16", "pp24 @ d48"]
    assert all(" ± " in line[6] for line in lines[2:])


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "128,many"), "--contexts is '128,many', must be numbers of tokens"),
        (("--contexts", "0"), "--contexts is 0, must be an integer of at least 1"),
        (("--rounds", "0"), "--rounds is 0, must be"),
        (("--new-tokens", "511"), "the model's context is 512 tokens. Try: --new-tokens 128"),
        (("--svg", "nowhere/x.svg"), "its folder does not exist"),
        (("--shared-prefix", "-1"), "--shared-prefix is -1"),
        (("--platform", "abacus"), "Unknown platform"),
    ],
)
def test_a_bad_option_is_a_usage_error_with_one_message(
    bench: Bench, llama: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = bench(llama, *QUICK, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_an_adapter_that_is_missing_ends_with_one_message(bench: Bench, llama: Path) -> None:
    code, out, err = bench(llama, *QUICK, "--adapter", "nowhere")
    assert (code, out) == (1, "")
    assert "nowhere" in err
    assert "Traceback" not in err


def test_work_of_a_small_model_is_as_counted_by_hand(llama: Path) -> None:
    work = ModelWork.of(plan(llama, "float32").model)
    # Of three layers: queries, keys and values, output, gates, down; four bytes a number.
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 64 * 192 + 96 * 64
    head, norms = 256 * 64, 7 * 64
    assert (work.numbers, work.weights_read(5)) == (3 * layer + head, 3 * layer + head)
    assert work.weight_bytes(1) == 4 * (3 * layer + head + norms)
    # Keys and values of two heads of 16, in three layers.
    assert work.context_bytes(10) == 10 * 3 * 2 * 2 * 16 * 4
    # Ten tokens see five others and half of themselves, by scores and sums of four heads.
    mixed = 3 * 2 * 4 * 16 * (10 * 5 + 10**2 / 2)
    assert work.operations(10, 5, 2) == 2 * 2 * (3 * layer * 10 + mixed + head)


def test_a_step_reads_only_the_chosen_share_of_experts(qwen3_moe: Path) -> None:
    planned = plan(qwen3_moe, "float32")
    experts: Any = planned.decoder
    count, top_k = experts.num_local_experts, experts.num_experts_per_tok
    (routed,) = {part for part in ModelWork.of(planned.model).weights if part.asked < 1}
    assert routed.numbers == count * 3 * experts.hidden_size * experts.moe_intermediate_size
    assert routed.num_bytes == 4 * routed.numbers
    assert routed.read(1) == pytest.approx(top_k / count)
    assert routed.read(2) == pytest.approx(1 - (1 - top_k / count) ** 2)


def test_windows_and_states_bound_the_work_of_mixing() -> None:
    layer = Mixing(token_bytes=3, products=5, window=4, state_bytes=7, state_numbers=2)
    assert (layer.read_bytes(3), layer.read_bytes(30)) == (9 + 14, 12 + 14)
    # Behind the window every token sees four others, in front of it half as many.
    assert layer.mixed(4) == 5 * 8 + 3 * 2 * 4
    assert layer.mixed(2, behind=4) == 5 * 8 + 3 * 2 * 2


class UnrunKind(Kind):
    def run(self, session: Any) -> Sample:
        raise NotImplementedError


def test_a_roofline_is_the_longer_of_reading_and_computing() -> None:
    kind = UnrunKind("x", "x")
    # Twice 2 ms of reading, once 3 ms of computing: 7 ms for 14 tokens.
    steps = [Step(2e6, 1e9, 5, 2), Step(1e6, 3e9, 4)]
    runs = [Sample(0.014, 14), Sample(0.028, 14), Sample(0.010, 14)]
    row = Row.of(kind, runs, Sample(0.02, 14, model_s=0.015), steps, ROOFS, None)
    assert row.ceiling == pytest.approx(2000)
    assert (row.memory_s, row.arithmetic_s) == pytest.approx((0.005, 0.005))
    assert (row.median, row.reached) == pytest.approx((1000, 0.5))
    # A quarter of the profiled run was outside of the model, so is a quarter of the median run.
    assert row.host_s == pytest.approx(0.0035)
    compared = Row.of(kind, runs[::-1], runs[0], [], ROOFS, row)
    assert compared.ratio == pytest.approx(1.0)
    assert (compared.ceiling, compared.held_by, compared.host_s) == (None, None, None)


@pytest.mark.parametrize(
    ("step", "model_s", "held_by"),
    [
        (Step(8e6, 1e9, 1), 0.009, "memory"),
        (Step(1e6, 8e9, 1), 0.009, "arithmetic"),
        (Step(1e6, 1e9, 1), 0.002, "host"),
        (Step(1e6, 2e9, 1), None, "arithmetic"),
    ],
)
def test_the_bottleneck_is_the_largest_known_part(
    step: Step, model_s: float | None, held_by: str
) -> None:
    run = Sample(0.01, 1, model_s=model_s)
    assert Row.of(UnrunKind("x", "x"), [run], run, [step], ROOFS, None).held_by == held_by
