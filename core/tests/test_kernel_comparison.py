"""A kernel is run on cases of its op and compared with the reference, in the examining process."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.waiting import WAIT_SECONDS

from interposer import Capability, Config
from interposer._examination.examiner import examine
from interposer._examination.inspection import perform
from interposer._examination.task import Task
from interposer._validation.distribution import Distribution
from interposer_sandbox import Finding

# The cases of this op are of 1, 2, ... 12 rows; a sample has the size of the request.
_OP = """
import torch
from interposer import Case, custom_op

def cases(dtype, seed):
    for rows in (12, *range(1, 12)):
        yield case(f"{rows} rows", torch.ones(rows, 4, dtype=dtype), rows)

def case(label, x, rows):
    return Case(label, {"x": x, "y": x.clone()}, {"rows": rows})

def sample(dtype, dims, num_tokens, seed):
    return case("sample", torch.ones(num_tokens, dims["rows"], dtype=dtype), dims["rows"])

@custom_op("add", cases=cases)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y

@custom_op("add", cases=cases, sample=sample)
def sampled_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y
"""
_KERNELS = f"""
import ctypes, gc, os, time, torch
from threading import Event
seen = []

def right(x, y):
    seen.append(x.shape[0])
    return x + y
def wrong(x, y): return x + y * 1.001
def wrong_if_large(x, y): return x + y if x.shape[1] < 100 else x
def not_a_number(x, y): return x * float("nan")
def misshapen(x, y): return (x + y)[:1]
def rounded(x, y): return (x + y).half()
def mutating(x, y): return x.add_(y)
def aliasing(x, y): return x
def straying(x, y):
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0)
    return x + y
def raising(x, y): raise OSError("on purpose")
def threading(x, y):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return x + y
def crashing(x, y): os.abort()
def hanging(x, y):
    while True: pass
def sleeping(x, y):
    while True: time.sleep(60)
def locking(x, y):
    while True: ctypes.PyDLL(None).sleep(60)
start, done = Event(), Event()
def meeting(x, y):
    start.set()
    assert done.wait({WAIT_SECONDS})
    return x + y
def never(*arguments, **keywords): return torch.tensor(False)
def patching(x, y):
    torch.Tensor.any, torch.equal, torch.allclose = never, lambda *a: True, lambda *a, **k: True
    return x
def patching_the_kit(x, y):
    from interposer_testing._checks import comparison, expectation
    comparison.compare_value = expectation.compare_value = lambda *a, **k: iter(())
    return x
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for lazy in args:
                if isinstance(lazy, Lazy):
                    lazy.as_subclass(torch.Tensor).copy_(lazy.x + lazy.y)
            return function(*args, **(kwargs or {{}}))
def lazy(x, y):
    result = torch.empty_like(x).as_subclass(Lazy)
    result.x, result.y = x, y
    return result
def leaving(x, y): os._exit(0)
def forging(x, y):
    for reporter in gc.get_objects():
        if type(reporter).__name__ == "_PipeReporter":
            reporter._pid = os.getpid()
            accepted = {{"accepted": True, "reason": "", "traceback": "", "facts": {{}}}}
            reporter.send(finding=accepted)
    return x
def judge(request):
    from interposer import Verdict
    return Verdict.accept() if request.dims["rows"] % 2 else Verdict.refuse("even")
def few(x, y):
    assert x.shape[0] % 2 and x.shape[0] < 8, x.shape
    return right(x, y)
"""
_PLUGIN = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel
from interposer.requires import Dim, Requires
INTERPOSER_API = ">=1.0,<2"

@hookimpl
def interposer_records():
    at = "acme_numerics.kernels:"
    return [
        Kernel("add", "add_right", at + "right"),
        Kernel("add", "add_few", at + "few", "acme", predicate=at + "judge",
               requires=Requires(frozenset({"fast"}), dims={"rows": Dim(at_most=7)})),
    ]
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "acme_numerics"
    folder.mkdir()
    for name, source in {"op": _OP, "kernels": _KERNELS, "plugin": _PLUGIN, "__init__": ""}.items():
        (folder / f"{name}.py").write_text(source)
    yield
    for module in [name for name in sys.modules if name.startswith("acme_numerics")]:
        del sys.modules[module]


def task(function: str, op: str = "add", **more: Any) -> Task:
    arguments = {
        "op": f"acme_numerics.op:{op}",
        "target": f"acme_numerics.kernels:{function}",
        "prepare": "",
        "dtype": "float32",
        "dims": {"rows": 3},
        "device": "cpu",
    }
    return Task("kernel", {**arguments, **more})


def recorded(kernel: str, features: frozenset[str] = frozenset({"fast"}), **more: Any) -> Task:
    names = {"plugin": "acme_numerics.plugin", "kernel": f"add_{kernel}", "platform": "cpu"}
    return task(kernel, **names, capability=Capability("x", features).to_json(), **more)


def seen() -> list[int]:
    """Return the numbers of rows that a kernel was called with, each once."""
    rows: list[int] = importlib.import_module("acme_numerics.kernels").seen
    return [*dict.fromkeys(rows)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_kernel_is_accepted(dtype: str) -> None:
    verdict = perform(task("right", dtype=dtype))
    assert verdict
    assert verdict.reason == "agrees with the reference of 'add' on 1 case(s)"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("wrong", r"output 0: .*\(value\)"),
        ("not_a_number", r"output 0: .*\(value\)"),
        ("misshapen", r"output 0: .*\(shape\)"),
        ("rounded", r"output 0: .*\(dtype\)"),
        ("mutating", r"argument 'x': it is written, but not declared in mutates"),
        ("aliasing", r"output 0: "),
        ("straying", "argument 'x': 1 elements outside of it are written"),
        ("raising", r"it raised OSError\('on purpose'\)"),
    ],
)
def test_a_wrong_kernel_is_refused_with_the_case_and_the_place(kernel: str, reason: str) -> None:
    verdict = perform(task(kernel))
    assert not verdict
    pattern = rf"departs from the reference of 'add': on case '3 rows',? {reason}"
    assert re.match(pattern, verdict.reason), verdict.reason
    assert bool(verdict.traceback) is (kernel == "raising")


def test_a_kernel_that_changes_settings_is_refused() -> None:
    reason = perform(task("threading")).reason
    assert reason == "running acme_numerics.kernels:threading changes torch's number of threads"


def test_the_smallest_cases_that_its_record_takes_are_run() -> None:
    assert perform(recorded("right"))
    assert seen() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_requirements_and_predicate_choose_the_cases() -> None:
    verdict = perform(recorded("few"))
    assert verdict, verdict.reason
    assert seen() == [1, 3, 5, 7]


def test_requirements_that_the_device_lacks_leave_no_case() -> None:
    verdict = perform(recorded("few", frozenset()))
    assert verdict.reason == "accepts no test case of 'add'; not compared"
    assert perform(recorded("few")).reason.endswith("on 4 case(s)")


def test_a_kernel_without_its_record_is_refused() -> None:
    names = {"plugin": "acme_numerics.plugin", "kernel": "add_wrong"}
    reason = perform(task("wrong", **names)).reason
    assert "declares no kernel 'add_wrong'" in reason


def test_roundings_that_a_record_states_are_allowed() -> None:
    """0.1 % of 2 are 0.001, and 2^-24 of it an unit roundoff: so many are too few, or enough."""
    assert not perform(task("wrong", extra_roundings=4_000))
    assert perform(task("wrong", extra_roundings=20_000))


def test_a_sample_has_the_size_of_the_request() -> None:
    finding = perform(task("wrong_if_large", "sampled_add", dims={"rows": 128}))
    assert "on case 'sample', output 0" in finding.reason
    assert perform(task("wrong_if_large", "sampled_add", dims={"rows": 12}))


def examined(kernel: str, seconds: float, folder: Path) -> Finding:
    config = Config(cache_dir=str(folder / "cache"), probe_seconds=seconds)
    distribution = Distribution("acme", "1.0", "f" * 64, (), str(folder), False)
    return examine(distribution, task(kernel), config)


@pytest.mark.landing(1)
@pytest.mark.process
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("right", "agrees with the reference of 'add' on 1 case"),
        ("wrong", "departs from the reference of 'add'"),
        ("crashing", "killed by SIGABRT while running acme_numerics.kernels:crashing on"),
    ],
)
def test_the_comparison_runs_in_the_examining_process(
    kernel: str, reason: str, tmp_path: Path
) -> None:
    finding = examined(kernel, WAIT_SECONDS, tmp_path)
    assert finding.reason.startswith(reason)
    assert finding.accepted is (kernel == "right")


@pytest.mark.process
def test_a_kernel_cannot_reach_the_comparison(tmp_path: Path) -> None:
    reasons = {
        "patching": "departs from the reference of 'add': on case '3 rows', output 0: ",
        "patching_the_kit": "departs from the reference of 'add': on case '3 rows', output 0: ",
        "lazy": "departs from the reference of 'add': on case '3 rows', result: Tensor expected",
        "leaving": "exited with code 0 while running acme_numerics.kernels:leaving on case",
        "forging": "closed the pipe of its examination while running acme_numerics.kernels:forging",
    }
    for kernel, reason in reasons.items():
        finding = examined(kernel, WAIT_SECONDS, tmp_path)
        assert not finding
        assert finding.reason.startswith(reason), finding.reason


@pytest.mark.landing(1)
@pytest.mark.process
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("hanging", r"while running acme_numerics\.kernels:hanging"),
        ("sleeping", r", waiting without working while running"),
        ("locking", r", holding the interpreter's lock while running"),
    ],
)
def test_a_kernel_that_does_not_return_is_refused(kernel: str, reason: str, tmp_path: Path) -> None:
    """A busy machine may need a longer limit to come as far as the kernel."""
    reasons = []
    for seconds in (0.2, 2.0, 20.0):
        finding = examined(kernel, seconds, tmp_path)
        assert not finding
        reasons.append(finding.reason)
        if re.match(rf"did not return within [\d.]+ s ?{reason}", finding.reason):
            return
    pytest.fail(f"not refused because of the kernel: {reasons}")


def test_another_thread_may_change_the_environment_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACME_APP", "0")
    kernels = importlib.import_module("acme_numerics.kernels")

    def work() -> None:
        kernels.start.wait(WAIT_SECONDS)
        os.environ["ACME_APP"] = "1"
        kernels.done.set()

    thread = Thread(target=work)
    thread.start()
    verdict = perform(task("meeting"))
    thread.join()
    assert verdict, verdict.reason
    assert os.environ["ACME_APP"] == "1"
