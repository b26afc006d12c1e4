"""The CPU benchmarks measure kernels and this engine, and name a baseline that cannot run."""

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
from interposer_engine.roofline import Roofs

SHIPPED = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "reason"),
    [("nothing_of_that_name", "ModuleNotFoundError"), ("contract", "AttributeError")],
)
def test_a_worker_that_fails_says_why(name: str, reason: str, tmp_path: Path) -> None:
    peers, processes = module("cpu_peers"), module("cpu_processes")
    engine = peers.Engine("x:y", 16, name, "hf", "ours")
    (tmp_path / "hf").mkdir()
    with pytest.raises(peers.Unavailable, match=reason):
        processes.Worker(engine, Path(sys.executable), tmp_path, 1, 60.0)


def test_a_missing_file_is_named() -> None:
    peers, processes = module("cpu_peers"), module("cpu_processes")
    (engine,) = peers.chosen_engines(["llama_cpp:q4_0"])
    with pytest.raises(peers.Unavailable, match=r"q4_0.gguf is missing. Try: .*cpu_models.py"):
        processes.Worker(engine, Path(sys.executable), Path("nowhere"), 1, 60.0)


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


def test_our_engine_runs_every_kind(tmp_path: Path) -> None:
    contract, kinds = module("cpu_engines.contract"), module("cpu_engines.kinds")
    models = module("cpu_models")
    shape = models.config_of("tiny", hidden_size=64, intermediate_size=64, vocab_size=256)
    models.write_hugging_face(shape, tmp_path / "hf")
    sizes = {f"model.layers.{n}.mlp.up_proj": (64, 64) for n in range(2)}
    adapters = tuple(str(write_adapter(tmp_path / str(n), sizes, seed=n)) for n in range(2))
    library = module("cpu_engines.interposer_engine")
    settings = contract.Settings(512, prefixes=True, adapters=adapters)
    engine = library.open_engine(tmp_path / "hf", "bf16", 1, settings)
    for row in (
        {"kind": "extend", "context": 64, "new_tokens": 32},
        {"kind": "shared", "context": 128},
        {"kind": "mixed", "batch": 4, "context": 8, "new_tokens": 17, "joining": 32},
        {"kind": "decode", "batch": 4, "context": 8, "new_tokens": 2, "adapters": [0, None, 1, 0]},
    ):
        found = kinds.run(engine, {"seed": 1, "vocab_size": 256, **row})
        assert all(value > 0 for value in found.values())
    assert engine.lm.adapters == ()
    # Of both second prompts whole pages are found again.
    assert engine.lm.engine.prefixes.shared_tokens >= 64 + 128 - 2 * 16


def test_our_engine_drafts_repeated_tokens() -> None:
    contract, kinds = module("cpu_engines.contract"), module("cpu_engines.kinds")
    rows = module("batch_kinds").guessed_rows(Namespace(scale=4, new_tokens=4))
    library = module("cpu_engines.interposer_engine")
    settings = contract.Settings(512, guesses=True)
    engine = library.open_engine(SHIPPED, "bf16", 1, settings)
    for row in rows:
        assert kinds.run(engine, {**row.command, "seed": 1})["tokens"] > 0
    assert engine.lm.speculation.drafted_tokens > 0
