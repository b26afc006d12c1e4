"""The parts of the CPU benchmarks that decide what is compared, and what their tables say."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapter_files import write_adapter

from interposer import current_registry
from interposer_models.roofline import Mixing, ModelWork, Roofs, Weights

SHIPPED = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Parameters of Qwen3-0.6B, without the 65,536 of its norms.
QWEN3_WEIGHTS = 596_049_920 - 65_536
HEAD = 1024 * 151936


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


class Counting:
    """A contender of next to no cost, which gives ``given`` tokens a step."""

    def __init__(self, given: int) -> None:
        self.given = given
        self.steps: list[str] = []

    def reserve(self, batch: int, tokens: int) -> None:
        self.steps.append(f"reserve {batch} x {tokens}")

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        self.steps.append(f"prefill {len(prompts)} x {len(prompts[0])}")
        return [0] * len(prompts)

    def step(self) -> list[int]:
        self.steps.append("step")
        return [0] * self.given

    def end(self) -> None:
        self.steps.append("end")

    def facts(self) -> dict[str, object]:
        return {}


ROW = {"batch": 2, "context": 5, "new_tokens": 3, "seed": 0, "vocab_size": 7}


def test_a_run_is_a_prefill_and_the_steps_after_it() -> None:
    contender = Counting(2)
    found = module("cpu_worker").run(contender, ROW)
    expected = ["reserve 2 x 9", "prefill 2 x 5", "step", "step", "step", "end"]
    assert contender.steps == expected
    assert found["prefill_s"] > 0
    assert found["decode_s"] > 0


def test_a_contender_that_skips_tokens_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gave \[1, 2\] tokens instead of 2"):
        module("cpu_worker").run(Counting(1), ROW)


def test_a_name_stands_for_a_contender_or_a_library() -> None:
    chosen = module("cpu_peers").chosen_contenders
    names = [contender.name for contender in chosen(["openvino", "llama_cpp:q4_0", "openvino"])]
    assert [name.partition(":")[0] for name in names] == ["openvino"] * 4 + ["llama_cpp"]
    (ours,) = chosen(["interposer:w4a8-g64"])
    assert (ours.bits, ours.option, ours.source) == (4, "w4a8-g64", "hf")


def test_an_unknown_name_is_refused() -> None:
    peers = module("cpu_peers")
    with pytest.raises(peers.Unavailable, match="no contender 'gpt'; known: interposer:bf16"):
        peers.chosen_contenders(["gpt"])


# What is rounded in the layers is rounded in the head.
ROUNDED = {"head_activations": "int8"}


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("bf16", None),
        ("fp8", {"quant_method": "fp8", "head": "int8"}),
        ("int4-g32", {"quant_method": "int4", "group_size": 32, "head": "int4"}),
        ("int8-a16", {"quant_method": "int8", "activations": "none", "head": "int8"}),
        ("int8", {"quant_method": "int8", "head": "int8", **ROUNDED}),
        ("w4a8-g64", {"quant_method": "w4a8", "group_size": 64, "head": "int4", **ROUNDED}),
    ],
)
def test_options_tell_how_to_quantize(option: str, settings: dict[str, Any] | None) -> None:
    found = module("cpu_contenders.interposer_engine").settings_of(option)
    assert found == (settings and {"head_activations": "none", **settings})


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nothing_of_that_name", "ModuleNotFoundError"), ("contract", "AttributeError")],
)
def test_a_worker_that_fails_says_why(name: str, reason: str, tmp_path: Path) -> None:
    peers, processes = module("cpu_peers"), module("cpu_processes")
    contender = peers.Contender("x:y", 16, name, "hf", "ours")
    (tmp_path / "hf").mkdir()
    with pytest.raises(peers.Unavailable, match=reason):
        processes.Worker(contender, Path(sys.executable), tmp_path, 1, 60.0)


def test_a_missing_file_is_named() -> None:
    peers, processes = module("cpu_peers"), module("cpu_processes")
    (contender,) = peers.chosen_contenders(["llama_cpp:q4_0"])
    with pytest.raises(peers.Unavailable, match=r"q4_0.gguf is missing. Try: .*cpu_models.py"):
        processes.Worker(contender, Path(sys.executable), Path("nowhere"), 1, 60.0)


def qwen3_work() -> ModelWork:
    # 28 layers, keys and values, 8 heads of 128, two bytes each; scores and sums of 16 heads.
    layers = (Mixing(2 * 8 * 128 * 2, 2 * 16 * 128),) * 28
    return ModelWork((Weights(QWEN3_WEIGHTS - HEAD),), Weights(HEAD), layers)


def test_a_step_reads_weights_of_so_many_bits_and_the_cache() -> None:
    decode_bytes, work = module("cpu_decode").decode_bytes, qwen3_work()
    cache = 28 * 2 * 8 * 128 * 2
    assert decode_bytes(work, 16, 8, 100) == 2 * QWEN3_WEIGHTS + 800 * cache
    assert decode_bytes(work, 4, 1, 10) == 0.5625 * QWEN3_WEIGHTS + 10 * cache


def test_ratios_are_those_within_a_round_to_the_best_peer() -> None:
    decode = module("cpu_decode")
    label = "decode, context 128"
    memory = {"load_s": 1.0, "load_peak_mib": 2.0, "peak_rss_mib": 3.0, "anonymous_mib": 4.0}
    rates = {
        "interposer:bf16": [10.0, 30.0, 20.0],
        "llama_cpp:bf16": [10.0, 10.0, 10.0],
        "vllm:bf16": [5.0, 40.0, 5.0],
    }
    group = decode.Group(
        2,
        16,
        rates={name: {label: values} for name, values in rates.items()},
        memory={name: {**memory, "facts": {}} for name in rates},
        failures={"onnx:int4": "not installed"},
        roofs=[{"bytes_per_s": 32e9, "flops_per_s": 4e11, "read_by": "torch.dot"}],
    )
    options = Namespace(contexts=[128], prefill=[], new_tokens=0, batch=1)
    rows, work = decode.rows_of(options), qwen3_work()
    lines = list(decode.report(group, rows, work))
    ceiling = 32e9 / decode.decode_bytes(work, 16, 1, 128)
    (line,) = [line for line in lines if line.startswith(f"| {label}")]
    assert f"| {ceiling:.0f} | 20.0 (10.0-30.0), {20 / ceiling:.0%}, x2.00 llama_cpp:bf16 |" in line
    assert "- onnx:int4: NOT RUN: not installed" in lines


def test_rows_are_run_once_for_what_they_share() -> None:
    options = Namespace(contexts=[128, 1024], prefill=[512, 1024], new_tokens=32, batch=8)
    rows = module("cpu_decode").rows_of(options)
    found = [(row.batch, row.context, row.new_tokens, row.shown) for row in rows]
    assert found == [
        (1, 128, 32, ("decode",)),
        (1, 1024, 32, ("prefill", "decode")),
        (1, 512, 0, ("prefill",)),
        (8, 128, 32, ("decode",)),
    ]
    rates = rows[-1].rates({"prefill_s": 1.0, "decode_s": 2.0})
    assert rates == {"batch 8, context 128": 128.0}


@pytest.mark.parametrize("name", ["bf16", "int8", "int4-g32", "w4a8-g32", "mxfp4"])
def test_every_kernel_that_accepts_is_timed(name: str) -> None:
    ops = module("cpu_ops")
    work = list(ops.linear_work(current_registry(), name, (64, 32), [1, 3], 5000))
    assert [each.what for each in work] == ["64 to 32, 1 rows", "64 to 32, 3 rows"]
    with torch.inference_mode():
        for each in work:
            found = list(ops.measured(each, Roofs(1e9, "", 1e9, 1), 1))
            assert [measure.kernel for measure in found] == list(each.calls)
            assert "reference" in each.calls
            assert all(measure.gb_per_s > 0 for measure in found)


class Kinds(Counting):
    """A contender that knows the kinds of batch, and gives two tokens a step where it guesses."""

    def __init__(self, given: int, adapters: int = 4) -> None:
        super().__init__(given)
        self.adapters = adapters

    def extend(self, prompt: list[int], known: int) -> list[int]:
        self.steps.append(f"extend {len(prompt)} behind {known}")
        return [0]

    def join(self, prompt: list[int]) -> None:
        self.steps.append(f"join {len(prompt)}")

    def several(self) -> list[list[int]]:
        return [[0, 0] for _ in self.step()]

    def draw(self, temperature: float, seed: int) -> None:
        self.steps.append(f"draw at {temperature} by {seed}")

    def use_adapters(self, numbers: list[int | None]) -> None:
        if len({*numbers}) > self.adapters:
            raise module("cpu_contenders.contract").Unsupported("one adapter for all requests")
        self.steps.append(f"adapters {numbers}")


def test_kinds_of_batch_are_runs_of_one_contract() -> None:
    kinds = module("cpu_contenders.kinds")

    def steps(given: int, **row: Any) -> tuple[list[str], dict[str, Any]]:
        contender = Kinds(given)
        found = kinds.run(contender, {"seed": 1, "vocab_size": 7, **row})
        assert all(value > 0 for value in found.values())
        return contender.steps, found

    run, found = steps(1, kind="extend", context=6, new_tokens=4)
    assert run == ["reserve 1 x 12", "prefill 1 x 6", "end", "extend 10 behind 6", "end"]
    assert set(found) == {"new", "known"}
    run, _ = steps(1, kind="shared", context=30)
    assert run == ["reserve 1 x 52", "prefill 1 x 50", "end", "extend 50 behind 30", "end"]
    run, found = steps(4, kind="mixed", batch=4, context=3, new_tokens=17, joining=5)
    assert run[2:12] == ["join 5", *["step"] * 8, "join 5"]
    assert set(found) == {"tokens", "gap_ms"}
    run, found = steps(2, kind="decode", batch=2, context=3, new_tokens=1, adapters=[0, 1])
    assert run[1:3] == ["adapters [0, 1]", "prefill 2 x 3"]
    assert run[-1] == "adapters []"
    run, found = steps(1, kind="guesses", prompt=[1, 2, 1, 2], new_tokens=5, temperature=1.0)
    assert run[1:3] == ["draw at 1.0 by 1", "prefill 1 x 4"]
    assert run.count("step") == 3  # of two tokens each
    assert set(found) == {"tokens"}


def test_both_prompts_share_their_beginning_and_no_round_has_it_again() -> None:
    kinds, seen = module("cpu_contenders.kinds"), []

    class Keeping(Kinds):
        def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
            seen.append(prompts[0])
            return [0]

        def extend(self, prompt: list[int], known: int) -> list[int]:
            seen.append(prompt)
            return [0]

    for seed in (1, 2):
        kinds.run(Keeping(1), {"kind": "shared", "context": 30, "seed": seed, "vocab_size": 999})
    first, second, other, _ = seen
    assert first[:30] == second[:30] != other[:30]
    assert first[30:] != second[30:]


def test_what_a_library_does_not_do_is_told_and_the_rest_goes_on() -> None:
    kinds, contender = module("cpu_contenders.kinds"), Kinds(2, adapters=1)
    row = {"kind": "decode", "batch": 2, "context": 3, "new_tokens": 1, "seed": 0, "vocab_size": 7}
    told = kinds.run(contender, {**row, "adapters": [0, 1]})
    assert told == {"unsupported": "one adapter for all requests"}
    assert "decode" in kinds.run(contender, {**row, "adapters": [0, 0]})
    with pytest.raises(RuntimeError, match=r"gave \[3\] tokens instead of 2"):
        kinds.run(Kinds(3), row)


def test_ratios_of_kinds_are_those_within_a_round(tmp_path: Path) -> None:
    kinds = module("batch_kinds")
    rates = {
        "plain": {"interposer:bf16": [10.0, 20.0, 30.0], "llama_cpp:bf16": [10.0, 10.0, 10.0]},
        "with": {"interposer:bf16": [10.0, 40.0, 90.0]},
        "gap": {"interposer:bf16": [2.0, 4.0, 8.0], "llama_cpp:bf16": [4.0, 4.0, 4.0]},
    }
    rows = (
        kinds.Row({}, {"tokens": "plain", "gap_ms": "gap"}),
        kinds.Row({}, {"tokens": "with"}),
    )
    suite = kinds.Suite(tmp_path, {}, rows, (("with", "plain"),))
    figures = kinds.Figures(rates, {"llama_cpp:bf16: with": "one adapter for all requests"})
    peers = ["interposer:bf16", "llama_cpp:bf16"]
    lines = list(kinds.report("x", suite, figures, Namespace(threads=2, peers=peers)))
    assert "| plain | 20.0 (10.0-30.0), x2.00 llama_cpp:bf16 | 10.0 (10.0-10.0) |" in lines
    # Fewer milliseconds are better.
    assert "| gap | 4.0 (2.0-8.0), x1.00 llama_cpp:bf16 | 4.0 (4.0-4.0) |" in lines
    assert "| with | 40.0 (10.0-90.0) | - |" in lines
    assert "| with / plain | x2.00 | - |" in lines
    assert "- llama_cpp:bf16: with: NOT RUN: one adapter for all requests" in lines


def test_our_engine_is_a_contender_of_every_kind(tmp_path: Path) -> None:
    contract, kinds = module("cpu_contenders.contract"), module("cpu_contenders.kinds")
    models = module("cpu_models")
    shape = models.config_of("tiny", hidden_size=64, intermediate_size=64, vocab_size=256)
    models.write_hugging_face(shape, tmp_path / "hf")
    sizes = {f"model.layers.{n}.mlp.up_proj": (64, 64) for n in range(2)}
    adapters = tuple(str(write_adapter(tmp_path / str(n), sizes, seed=n)) for n in range(2))
    engine = module("cpu_contenders.interposer_engine")
    settings = contract.Settings(512, prefixes=True, adapters=adapters)
    contender = engine.open_contender(tmp_path / "hf", "bf16", 1, settings)
    for row in (
        {"kind": "extend", "context": 64, "new_tokens": 32},
        {"kind": "shared", "context": 128},
        {"kind": "mixed", "batch": 4, "context": 8, "new_tokens": 17, "joining": 32},
        {"kind": "decode", "batch": 4, "context": 8, "new_tokens": 2, "adapters": [0, None, 1, 0]},
    ):
        found = kinds.run(contender, {"seed": 1, "vocab_size": 256, **row})
        assert all(value > 0 for value in found.values())
    assert contender.lm.adapters == ()
    # Of both second prompts whole pages are found again.
    assert contender.lm.engine.prefixes.shared_tokens >= 64 + 128 - 2 * 16


def test_our_engine_guesses_what_repeats_itself() -> None:
    contract, kinds = module("cpu_contenders.contract"), module("cpu_contenders.kinds")
    rows = module("batch_kinds").guessed_rows(Namespace(scale=4, new_tokens=4))
    engine = module("cpu_contenders.interposer_engine")
    settings = contract.Settings(512, guesses=True)
    contender = engine.open_contender(SHIPPED, "bf16", 1, settings)
    for row in rows:
        assert kinds.run(contender, {**row.command, "seed": 1})["tokens"] > 0
    assert contender.lm.speculation.drafted_tokens > 0


def test_a_fraction_is_that_of_the_ceiling_beside_it() -> None:
    fractions = module("cpu_fractions")
    row = fractions.Row("decode 128", "w4a8-g32", 2)
    for rate, ceiling in ((34.0, 40.0), (60.0, 80.0), (54.0, 60.0)):
        row.add(rate, {"memory": ceiling})
    assert row.fractions("memory") == pytest.approx((0.85, 0.8, 0.875))
    assert "| 54.0 | 85% of memory 60.0 [80% 88%] (goal 85%) |" in fractions.line(row)
    measures = iter([2.0, 4.0])
    assert fractions.between(lambda: next(measures), lambda: 1.0) == (1.0, 3.0)
