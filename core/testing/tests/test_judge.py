"""The judge accepts right kernels, and refuses those that look right only to a judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from interposer import Case, Tolerance, custom_op
from interposer_testing import Budget, Solution, Task, Verdict, Workload, judge
from interposer_testing._tasks.expected import counted
from interposer_testing.corpus import Entry, entries

pytestmark = pytest.mark.process

_SHORT = Budget(correctness_seconds=20.0, timing_seconds=0.5, rerun_seconds=2.0, rerun_calls=2000)
_SIZES = ((4, 8), (1, 5), (33, 64))


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


def _judged(code: str, task: Task | None = None, seed: int | None = None) -> Verdict:
    source = "import ctypes, os, sys, threading, time\nimport torch\n" + code
    file = Path("kernel.py")
    solution = Solution("kernel", file, file.name, "kernel", "python", {file.name: source.encode()})
    return judge(task or _task(), solution, seed=seed, budget=_SHORT)


def test_a_right_kernel_is_accepted_with_its_time_and_error() -> None:
    verdict = _judged("def kernel(x, factor):\n    return x * factor\n")
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


# The corpus has more of each kind.
_IN_EVERY_LANDING = {
    *("wrong value", "reads behind an argument", "ends the process", "replaces a function"),
    *("writes to the judge", "fills the result later"),
}


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


def test_a_hanging_kernel_is_refused() -> None:
    budget = Budget(1.0, 1.0, 1.0, 10, call_seconds=3.0)
    code = b"import time\ndef kernel(x, factor):\n    time.sleep(1000)\n"
    file = Path("kernel.py")
    solution = Solution("kernel", file, file.name, "kernel", "python", {file.name: code})
    verdict = judge(_task(), solution, budget=budget)
    assert verdict.state == "refused"
    assert "did not answer within" in verdict.findings[0].reason


def test_a_known_seed_repeats_the_inputs_and_lowers_the_tier() -> None:
    code = "def kernel(x, factor):\n    return x * (factor + 1e-3)\n"
    first, second = (_judged(code, seed=7) for _ in range(2))
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


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.verdict}-{entry.name}")
def test_the_corpus_gets_its_verdicts(entry: Entry) -> None:
    if entry.needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU with CUDA")
    from interposer_testing import read_task

    sources = {entry.path.name: entry.path.read_bytes()}
    solution = Solution(entry.name, entry.path, entry.path.name, entry.function, "python", sources)
    budget = Budget(correctness_seconds=8.0, timing_seconds=2.0, rerun_seconds=6.0)
    verdict = judge(read_task(entry.op), solution, budget=budget)
    is_accepted = verdict.state == "accepted"
    assert is_accepted == (entry.verdict == "accepted"), f"{verdict}\n{entry.why}"
