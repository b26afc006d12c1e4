"""The benchmarks of accelerators: what they count, and what they say without one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.forks import forks
from transformers import LlamaConfig

from interposer import Capability, Config, Device, Kernel, current_registry, hookimpl, register
from interposer.records import load_target
from interposer_models.families import Llama
from interposer_models.roofline import Roofs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}
# Parameters of Llama-3-8B, without the 266,240 of its norms and the embedding that no step reads.
READ = 8_030_261_248 - 266_240 - 4096 * 128256


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
@pytest.mark.parametrize(
    "arguments", [["gpu_ops.py"], ["gpu_decode.py", "anywhere"], ["gpu_tune.py", "tiny"]]
)
def test_without_an_accelerator_one_sentence_says_so(arguments: list[str]) -> None:
    script, *rest = arguments
    done = forks().run(BENCHMARKS / script, *rest)
    sentence = f"Nothing is measured: torch {torch.__version__} sees no accelerator on this machine"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{sentence}.\n")


def test_a_step_reads_all_weights_but_the_embedding() -> None:
    decode = module("gpu_decode")
    config = json.loads(LlamaConfig(**SHAPE).to_json_string(use_diff=False))
    shape = Llama.parse(config, "here")
    none, flops = decode.least_work(shape, decode.Work(0, 0, 0, 1))
    assert none == 2 * READ
    # One token: all weights once, and a score and a value for each head and dimension, halved.
    assert flops == 2 * READ + 2 * 32 * 32 * 128
    some, _ = decode.least_work(shape, decode.Work(3, 100, 20, 1))
    assert some - none == 3 * 110 * 32 * 8 * 128 * 2 * 2


def measured_by(ops: Any, clock: Any, item: Any) -> tuple[Any, Any]:
    """Return the figures of an item in float32 on this processor, and the record."""
    record = module("evidence.record").Record()
    device = Device("cpu", "cpu", "here", Capability("any"))
    roofs = Roofs(1e9, "a copy", 1e12, 1)
    registry = current_registry(Config(isolation="off"))
    bench = ops.Bench(registry, device, torch.float32, clock.clock_of("cpu", True), roofs, record)
    bench.measure(item)
    return bench, record


def test_figures_are_of_what_the_clock_says() -> None:
    ops, clock, workload = module("gpu_ops"), module("gpu_clock"), module("gpu_workload")
    item = workload.Item("silu_and_mul", workload.dims_of("silu_and_mul"), (2, 3))
    bench, record = measured_by(ops, clock, item)
    assert record.faults == []
    assert {figure.num_tokens for figure in bench.figures} == {2, 3}
    for figure in bench.figures:
        assert figure.op == "silu_and_mul"
        assert figure.num_bytes == figure.num_tokens * 3 * 14336 * 4
        assert figure.bytes_share == pytest.approx(figure.num_bytes / figure.seconds / 1e9)
        assert f"{1e6 * figure.seconds:.1f}" in ops.line(figure)
    assert len(record.rows) == len(bench.figures)


def test_a_wrong_kernel_is_a_fault_and_not_timed() -> None:
    ops, clock, workload = module("gpu_ops"), module("gpu_clock"), module("gpu_workload")
    wrong = ModuleType("wrong_gate")
    wrong.__dict__.update(
        gate=lambda x: x.chunk(2, dim=-1)[1].clone(),
        interposer_records=hookimpl(
            lambda: [Kernel("silu_and_mul", "silu_and_mul_wrong", "wrong_gate:gate")]
        ),
    )
    sys.modules["wrong_gate"] = wrong
    try:
        with register(wrong):
            item = workload.Item("silu_and_mul", workload.dims_of("silu_and_mul", True), (2,))
            bench, record = measured_by(ops, clock, item)
    finally:
        del sys.modules["wrong_gate"]
    (fault,) = record.faults
    assert fault.startswith("silu_and_mul silu_and_mul_wrong: result 0 is")
    assert "silu_and_mul_wrong" not in {figure.kernel for figure in bench.figures}


def test_only_what_a_call_names_is_counted() -> None:
    workload = module("gpu_workload")
    registry = current_registry()

    def counted(name: str, tokens: int) -> tuple[int, Any]:
        op = load_target(registry.ops[name].target)
        case = op.sample(torch.bfloat16, workload.dims_of(name, True), tokens, 0)
        _, result = workload.num_flops(op, ops_copied(case.arguments))
        return workload.moved_bytes(op, case.arguments, result), case.arguments

    ops_copied = module("gpu_ops").copied
    # Two rows of 128 are read and written, and two indices read.
    moved, arguments = counted("embedding", 2)
    assert moved == 2 * (2 * 128 * 2 + arguments["token_ids"].nbytes)
    moved, arguments = counted("fused_experts", 1)
    weights = arguments["gate_up"].nbytes + arguments["down"].nbytes
    assert moved < weights
    assert moved > weights * 2 // 8  # two of eight experts


@pytest.mark.parametrize("tiny", [False, True])
def test_every_op_with_a_sample_has_dims(tiny: bool) -> None:
    """In a rehearsal all samples are drawn; of the real ones, which are large, the dims are."""
    workload = module("gpu_workload")
    registry = current_registry()
    for name in registry.ops:
        op = load_target(registry.ops[name].target)
        dims = workload.dims_of(name, tiny)
        if op.sample is not None and tiny:
            assert op.sample(torch.bfloat16, dims, 2, 0).arguments, name
        elif "group_size" in dims and name in ("w4a16_linear", "w8a16_linear"):
            assert dims["num_groups"] * dims["group_size"] == dims["in_features"]


class Steady:
    """A contender whose steps all take as long."""

    notes = ""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.calls: list[tuple[int, int, int]] = []

    def decode(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        self.calls.append((len(prompts), len(prompts[0]), new_tokens))
        return [self.step_s] * (new_tokens - 1)

    def prefill(self, prompts: list[list[int]]) -> float:
        self.calls.append((len(prompts), len(prompts[0]), 1))
        return 0.5


def test_figures_of_models_are_compared() -> None:
    decode = module("gpu_decode")
    shape = SimpleNamespace(vocab_size=99)
    work = decode.Work(2, 8, 4, 16)
    figures = []
    for name, precision, step_s in (
        ("interposer", "bf16", 0.1),
        ("interposer", "fp8", 0.05),
        ("static", "bf16", 0.3),
    ):
        contender = Steady(step_s)
        figure = decode.measured(contender, shape, work, 2)
        assert contender.calls == [(2, 8, 4), (1, 16, 1)] * 3
        figure.model, figure.precision, figure.contender = "acme", precision, name
        figures.append(figure)
    assert decode.headline(figures) == (
        "acme bf16 100.00 ms, 0%, x3.00 of transformers' static cache; "
        "acme fp8 50.00 ms, 0%, x6.00 of transformers' static cache, x2.00 of bf16"
    )


def test_large_batches_have_short_contexts() -> None:
    decode = module("gpu_decode")
    options = SimpleNamespace(context=1024, new_tokens=32, prefill=8192)
    found = {batch: decode.work_of(batch, options).context for batch in (1, 8, 64, 256)}
    assert found == {1: 1024, 8: 1024, 64: 1024, 256: 256}
