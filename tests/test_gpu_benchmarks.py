"""The benchmarks of accelerators say that there is none, and refuse to time a wrong kernel."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.forks import forks

from interposer import Capability, Config, Device, Kernel, current_registry, hookimpl, register
from interposer.records import load_target
from interposer_engine.roofline import Roofs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.process
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
@pytest.mark.parametrize(
    "arguments",
    [["gpu_ops.py"], ["gpu_decode.py", "anywhere"], ["gpu_tune.py", "tiny"], ["gpu_judge.py"]],
)
def test_without_an_accelerator_one_sentence_says_so(arguments: list[str]) -> None:
    script, *rest = arguments
    done = forks().run(BENCHMARKS / script, *rest)
    sentence = f"Nothing is measured: torch {torch.__version__} sees no accelerator on this machine"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{sentence}.\n")


def measured_by(ops: Any, clock: Any, item: Any) -> tuple[Any, Any]:
    """Return the results of an item in float32 on this processor, and the record."""
    record = module("evidence.record").Record()
    device = Device("cpu", "cpu", "here", Capability("any"))
    roofs = Roofs(1e9, "a copy", 1e12, 1)
    registry = current_registry(Config(isolation="off"))
    bench = ops.Bench(registry, device, torch.float32, clock.clock_of("cpu", True), roofs, record)
    bench.measure(item)
    return bench, record


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
    timed = {figure.kernel for figure in bench.figures}
    assert timed
    assert "silu_and_mul_wrong" not in timed


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
