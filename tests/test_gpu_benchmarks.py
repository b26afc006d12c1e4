"""The benchmarks of accelerators: what they count, and what they say without one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import forks
from transformers import LlamaConfig

from interposer import Capability, Device, current_registry
from interposer.records import load_target
from interposer_models import DecoderConfig

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
@pytest.mark.parametrize("arguments", [["gpu_ops.py"], ["gpu_decode.py", "anywhere"]])
def test_without_an_accelerator_one_sentence_says_so(arguments: list[str]) -> None:
    script, *rest = arguments
    done = forks().run(BENCHMARKS / script, *rest)
    sentence = f"Nothing is measured: torch {torch.__version__} sees no accelerator on this machine"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{sentence}.\n")


def test_a_step_reads_all_weights_but_the_embedding() -> None:
    decode = module("gpu_decode")
    config = json.loads(LlamaConfig(**SHAPE).to_json_string(use_diff=False))
    shape = DecoderConfig.parse({**config, "architectures": ["LlamaForCausalLM"]}, "here")
    none, flops = decode.least_work(shape, decode.Work(0, 0, 0, 1))
    assert none == 2 * READ
    # One token: all weights once, and a score and a value for each head and dimension, halved.
    assert flops == 2 * READ + 2 * 32 * 32 * 128
    some, _ = decode.least_work(shape, decode.Work(3, 100, 20, 1))
    assert some - none == 3 * 110 * 32 * 8 * 128 * 2 * 2


class HostClock:
    """Calls everything once, and gives each call another number of seconds."""

    def time(self, calls: list[Any]) -> list[float]:
        for call in calls:
            call()
        return [1e-3 * number for number, _ in enumerate(calls, 1)]


def test_figures_are_of_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, clock = module("gpu_ops"), module("gpu_clock")
    # What torch's compiler makes of it is not the subject, and takes long.
    monkeypatch.setattr(ops, "compiled", lambda op, positional: {})
    registry = current_registry()
    op = load_target(registry.ops["silu_and_mul"].target)
    device = Device("cpu", "cpu", "here", Capability("any"))
    roofs = clock.Roofs(1e9, 1e12)
    found = [
        *ops.measured(registry, "silu_and_mul", op, device, torch.float32, 2, HostClock(), roofs)
    ]
    figures = [figure for figure in found if isinstance(figure, ops.Figure)]
    assert figures
    for figure in figures:
        assert figure.op == "silu_and_mul"
        assert figure.bytes_share == pytest.approx(2 * 3 * 14336 * 4 / figure.seconds / 1e9)
        assert f"{1e6 * figure.seconds:.1f}" in ops.line(figure)


def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode, clock = module("gpu_decode"), module("gpu_clock")
    work = decode.Work(1, 8, 4, 8)
    calls: list[tuple[int, int]] = []

    def run(prompts: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
        calls.append((len(prompts[0]), new))
        return 0.5, 0.3, [[1] * new]

    figures = [decode.measured(name, run, 99, work, 2) for name in ("graphs", "plain", "static")]
    assert calls == [(8, 4), (8, 1)] * 9
    figures[2].decode_step_s *= 2
    decode.report(figures, clock.Roofs(1.0, 1.0), work, tmp_path / "out.json")
    said = capsys.readouterr().out
    assert "with and without graphs are equal" in said
    assert "2.00 times as fast as transformers" in said
    facts = json.loads((tmp_path / "out.json").read_text())
    assert [figure["contender"] for figure in facts["figures"]] == ["graphs", "plain", "static"]
    assert facts["figures"][0]["decode_step_s"] == pytest.approx(0.1)
