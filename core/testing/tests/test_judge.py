"""The judge accepts right kernels, and refuses those that look right only to a judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from interposer import Case, Tolerance, custom_op
from interposer.errors import ConfigError
from interposer_testing import (
    Budget,
    Solution,
    Task,
    Verdict,
    Workload,
    judge,
    read_solution,
    read_task,
)
from interposer_testing._judge import judging
from interposer_testing._judge.clock import Limits, Roofline
from interposer_testing._judge.memory import ExportedMemory
from interposer_testing._judge.process import KernelProcess, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunctions
from interposer_testing._tasks.expected import counted
from interposer_testing.corpus import Entry, entries

pytestmark = pytest.mark.process

_SHORT = Budget(correctness_seconds=20.0, timing_seconds=0.5, rerun_seconds=2.0, rerun_calls=2000)
_SIZES = ((4, 8), (1, 5), (33, 64))


_FAILING_PROBLEM = """\
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        if len(x) < 8:
            raise ValueError("too few rows")
        return x


def get_inputs():
    return [torch.rand(4, 2)]


def get_init_inputs():
    return []
"""


@custom_op("scaled", cases=lambda _dtype, _seed: iter(()), tolerance=Tolerance(roundings=2))
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _task(sizes: Sequence[tuple[int, ...]] = _SIZES) -> Task:
    def workload(size: tuple[int, ...]) -> Workload:
        def case(generator: torch.Generator) -> Case:
            x = torch.randn(size, generator=generator)
            return Case(str(size), {"x": x, "factor": 3.0}, reduction=0, magnitude=0.0)

        return Workload(str(size), case, timed=size == sizes[-1])

    return Task(
        name="scaled",
        source="op",
        digest="0" * 64,
        op=scaled,
        workloads=tuple(map(workload, sizes)),
        expect=lambda case: counted(scaled, case),
    )


def _judged(
    code: str,
    *,
    seed: int | None = None,
    budget: Budget = _SHORT,
    sources: Mapping[str, bytes] = MappingProxyType({}),
    **options: Any,
) -> Verdict:
    source = "import ctypes, os, sys, threading, time\nimport torch\n" + code
    file = Path("kernel.py")
    files = {**sources, file.name: source.encode()}
    solution = Solution("kernel", file, file.name, "kernel", "python", files)
    return judge(_task(), solution, seed=seed, budget=budget, **options)


def test_a_right_kernel_is_accepted_with_its_time_and_error() -> None:
    """Files of a solution do not replace modules of its process."""
    others = dict.fromkeys(("serve.py", "json.py", "socket.py"), b"1 / 0")
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n", sources=others)
    assert verdict.state == "accepted", str(verdict)
    assert verdict.tier == "gate"
    assert verdict.largest_error <= 1
    (timing,) = verdict.timings
    assert timing.workload == "(33, 64)"
    assert 0 < timing.low <= timing.median <= timing.high
    assert verdict.num_calls_afterwards > verdict.num_calls
    facts = json.loads(verdict.to_json())
    assert facts["schema"] == 1
    assert facts["solution"]["sha256"] == verdict.solution["sha256"]


@pytest.mark.slow
def test_a_kernel_can_be_timed_with_warm_caches() -> None:
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n", caches="warm")
    assert verdict.state == "accepted", str(verdict)
    assert json.loads(verdict.to_json())["caches"] == "warm"
    assert "the arguments of timed calls lay in the caches" in str(verdict)


WRONG = {
    "wrong value": ("return x * (factor + 1e-3)", "value"),
    "wrong dtype": ("return (x * factor).double()", "dtype"),
    "an argument is written": ("return x.mul_(factor)", "alias"),
    "reads behind an argument": (
        "ctypes.string_at(x.data_ptr() + 4 * x.numel() + 1024, 1); return x * factor",
        "process",
    ),
    "uninitialized memory": ("y = torch.empty_like(x); y[1:] = x[1:] * factor; return y", "value"),
    "raises": ("raise ValueError('no')", "call"),
    "ends the process": ("os._exit(0)", "process"),
    "ends the program": ("sys.exit(0)", "call"),
    "closes all files": ("os.closerange(3, 64); return x * factor", "process"),
    "replaces a function": ("torch.allclose = lambda *a, **k: True; return x * factor", "process"),
    "changes a setting": ("torch.set_default_dtype(torch.float64); return x * factor", "process"),
    "writes to the judge": (
        "[os.write(n, b'{}\\n') for n in range(3, 99)"
        " if 'socket' in os.path.realpath(f'/proc/self/fd/{n}')]; return x * factor",
        "process",
    ),
    "fills the result later": (
        "y = torch.zeros_like(x)\n"
        "    threading.Timer(0.2, lambda: y.copy_(x * factor)).start()\n    return y",
        "value",
    ),
    "remembers by address": (
        "y = MEMORY.setdefault((x.data_ptr(), x.shape), x * factor); return y.clone()",
        "value",
    ),
}


# The corpus has more of each kind, and another test refuses a wrong value.
_IN_EVERY_LANDING = {
    *("reads behind an argument", "ends the process", "replaces a function"),
    *("writes to the judge", "fills the result later"),
}


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("code", "check"),
    [
        pytest.param(*values, marks=() if name in _IN_EVERY_LANDING else pytest.mark.slow, id=name)
        for name, values in WRONG.items()
    ],
)
def test_a_wrong_kernel_is_refused(code: str, check: str) -> None:
    verdict = _judged(f"MEMORY = {{}}\ndef kernel(x, factor):\n    {code}\n")
    assert verdict.state == "refused", str(verdict)
    assert check in {finding.check for finding in verdict.findings}, str(verdict)


def test_an_output_that_is_written_after_the_call_is_refused() -> None:
    code = (
        "import threading, time\n"
        "def kernel(x, factor, out):\n"
        "    def write():\n        time.sleep(0.02)\n        out.copy_(x * factor)\n"
        "    threading.Thread(target=write).start()\n"
    )
    file = Path("kernel.py")
    sources = {file.name: code.encode()}
    solution = Solution(
        "kernel", file, file.name, "kernel", "python", sources, style="writes outputs"
    )
    verdict = judge(_task(), solution, budget=_SHORT)
    assert verdict.state == "refused"
    assert {finding.stage for finding in verdict.findings} == {"correctness"}


def test_a_kernel_that_misbehaves_after_the_judging_is_refused() -> None:
    code = (
        "CALLS = 0\n"
        "def kernel(x, factor):\n"
        "    global CALLS\n    CALLS += 1\n"
        "    return x * factor if CALLS < 1500 else torch.zeros_like(x)\n"
    )
    verdict = _judged(code)
    assert verdict.state == "refused"
    assert {finding.stage for finding in verdict.findings} == {"rerun"}


@pytest.mark.slow
def test_a_slow_kernel_is_called_as_often_as_the_time_of_the_rerun_allows() -> None:
    code = "def kernel(x, factor):\n    time.sleep(0.02)\n    return x * factor\n"
    budget = Budget(1.0, 0.2, 1.0, rerun_calls=120_000, call_seconds=5.0)
    verdict = _judged(code, budget=budget)
    assert verdict.state == "accepted", str(verdict)


def test_the_machine_is_measured_while_the_kernel_is_stopped_and_again_before_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes: list[KernelProcess] = []
    are_stopped: list[bool] = []

    class WatchedProcess(KernelProcess):
        def __enter__(self) -> KernelProcess:
            processes.append(self)
            return super().__enter__()

    class WatchedRoofline(Roofline):
        """A machine that seems to be slow when it is measured for the first time."""

        def of(self, *arguments: Any) -> Limits:
            are_stopped.append(processes[-1].is_stopped())
            limits = super().of(*arguments)
            return replace(limits, floor=1e9) if len(are_stopped) == 1 else limits

    monkeypatch.setattr(judging, "KernelProcess", WatchedProcess)
    monkeypatch.setattr(judging, "Roofline", WatchedRoofline)
    judging._roofline.cache_clear()
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n")
    judging._roofline.cache_clear()
    assert verdict.state == "accepted", str(verdict)
    assert are_stopped == [True, True]


def test_a_verdict_without_all_workloads_is_no_gate() -> None:
    budget = Budget(correctness_seconds=0.0, timing_seconds=0.5, rerun_seconds=0.5, rerun_calls=10)
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n", budget=budget)
    assert verdict.tier == "triage"
    (note,) = verdict.notes
    assert "workloads were not compared, as the time had ended" in note


def test_a_task_whose_reference_fails_has_no_verdict(tmp_path: Path) -> None:
    problem = tmp_path / "1_Tiles.py"
    problem.write_text(_FAILING_PROBLEM)
    solution = tmp_path / "solution.py"
    solution.write_text(_FAILING_PROBLEM + "\n\nclass ModelNew(Model):\n    pass\n")
    task = read_task(str(problem))
    reason = r"The reference of '.*/1_Tiles' failed: .*too few rows.* Correct the definition"
    with pytest.raises(ConfigError, match=reason):
        judge(task, read_solution(str(solution), task), budget=_SHORT)


def test_a_hanging_kernel_is_refused() -> None:
    budget = Budget(1.0, 1.0, 1.0, 10, call_seconds=3.0)
    code = b"import time\ndef kernel(x, factor):\n    time.sleep(1000)\n"
    file = Path("kernel.py")
    solution = Solution("kernel", file, file.name, "kernel", "python", {file.name: code})
    verdict = judge(_task(), solution, budget=budget)
    assert verdict.state == "refused"
    assert "did not answer within" in verdict.findings[0].reason


def test_a_known_seed_repeats_the_inputs_and_lowers_the_tier() -> None:
    code = f"def kernel(x, factor):\n    {WRONG['wrong value'][0]}\n"
    first, second = (_judged(code, seed=7) for _ in range(2))
    assert first.state == "refused", str(first)
    assert {finding.check for finding in first.findings} == {"value"}
    assert first.tier == "advisory"
    assert first.findings == second.findings


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_a_cpp_file_is_judged() -> None:
    code = b"""#include <torch/extension.h>
torch::Tensor kernel(torch::Tensor x, double factor) { return x * factor; }
"""
    file = Path("kernel.cpp")
    solution = Solution("kernel", file, file.name, "kernel", "cpp", {file.name: code})
    verdict = judge(_task(), solution, budget=_SHORT)
    assert verdict.state == "accepted", str(verdict)


# The path for GPUs, except for the calls of CUDA: results are copied into shared memory.


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "memory_of", lambda _device: ExportedMemory())


@pytest.mark.usefixtures("exported")
def test_results_that_the_process_copies_are_judged() -> None:
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n")
    assert verdict.state == "accepted", str(verdict)
    assert len(verdict.timings) == 1


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "fills the result later" else pytest.mark.slow)
        for name in WRONG
    ],
)
def test_wrong_results_that_the_process_copies_are_refused(name: str) -> None:
    code, check = WRONG[name]
    verdict = _judged(f"MEMORY = {{}}\ndef kernel(x, factor):\n    {code}\n")
    assert verdict.state == "refused", str(verdict)
    assert check in {finding.check for finding in verdict.findings}, str(verdict)


@pytest.mark.slow
@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize(
    "entry",
    [e for e in entries() if e.needs == "cpu" and e.symptom in ("memory", "form", "")][::4],
    ids=lambda entry: f"{entry.verdict}-{entry.name}",
)
def test_the_corpus_gets_its_verdicts_from_copies(entry: Entry) -> None:
    _check_verdict(entry, Budget(correctness_seconds=8.0, timing_seconds=2.0, rerun_seconds=6.0))


class _LateMemory:
    """Memory to which a device still writes between two readings."""

    def __init__(self) -> None:
        self._readings = 0

    def contains(self, offset: int, num_bytes: int) -> bool:
        return offset + num_bytes <= 64

    def settle(self) -> None:
        pass

    def view(self, _offset: int, num_bytes: int) -> torch.Tensor:
        self._readings += 1
        return torch.full((num_bytes,), self._readings, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("exports", "reason"),
    [
        ([[[1000, 16, 0]]], "a result changes after the call has returned"),
        ([[[1000, 16, 60]]], "described the copies of its results wrongly"),
        ([[[1000, 16]]], "described the copies of its results wrongly"),
        ([[["a", 16, 0]]], "described the copies of its results wrongly"),
        (7, "described the copies of its results wrongly"),
    ],
)
def test_unusable_copies_of_results_are_refused(exports: Any, reason: str) -> None:
    functions = RemoteFunctions(cast(KernelProcess, SimpleNamespace(memory=_LateMemory())))
    with pytest.raises(ProcessEndedError, match=reason):
        functions.read_exports(exports)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU with CUDA")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' is not available.*Try: the device 'cpu'"):
        _judged("def kernel(x, factor):\n    return x * factor\n", device="cuda")


def test_unusable_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device = 'tpu' is unknown\. Try: 'cpu' or 'cuda'"):
        _judged("kernel = None", device="tpu")
    file = Path("kernel.py")
    solution = Solution("k", file, file.name, "k", "python", {}, style="writes outputs")
    with pytest.raises(ConfigError, match="writes to outputs that it is given"):
        judge(_task(), solution, device="cuda")


# Triton kernels run on the CPU by Triton's interpreter.


@pytest.mark.parametrize(
    "name",
    [
        "partial_grid.half_of_the_rows",
        pytest.param("triton_kernel.tiles_of_columns", marks=pytest.mark.slow),
    ],
)
def test_triton_kernels_are_judged_without_a_gpu(name: str) -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    (entry,) = (entry for entry in entries() if entry.name == name)
    verdict = _check_verdict(entry, Budget(4.0, 0.5, 2.0, 100))
    assert verdict.timings == ()
    assert verdict.device.startswith("Triton's interpreter on ")
    assert "not timed" in verdict.notes[0]
    assert verdict.notes[0] in str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.verdict}-{entry.name}")
def test_the_corpus_gets_its_verdicts(entry: Entry) -> None:
    budget = Budget(correctness_seconds=8.0, timing_seconds=2.0, rerun_seconds=6.0)
    if entry.needs == "triton":
        budget = replace(budget, correctness_seconds=40.0, rerun_seconds=30.0)
    _check_verdict(entry, budget)


def _check_verdict(entry: Entry, budget: Budget) -> Verdict:
    if entry.needs == "triton":
        pytest.importorskip("triton", reason="needs the package triton")
    if entry.needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU with CUDA")
    task = read_task(entry.op)
    device = "cuda" if entry.needs == "cuda" else "cpu"
    solution = read_solution(f"{entry.path}:{entry.function}", task, device)
    verdict = judge(task, solution, device=device, budget=budget, backward=entry.backward)
    is_accepted = verdict.state == "accepted"
    assert is_accepted == (entry.verdict == "accepted"), f"{verdict}\n{entry.why}"
    return verdict
