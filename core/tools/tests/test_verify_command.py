"""``interposer verify`` ends with 0, 1 or 2, writes its files, and survives what crashes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.forks import forks

from interposer_testing import Examined, Ground, Report, Tally

pytestmark = pytest.mark.process

OPS = """
import os, signal, sys, time
import torch
from interposer import Case, Tolerance, custom_op

def cases(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    for label, shape in {"rows": (4, 8), "one row": (1, 8)}.items():
        x = torch.randn(shape, generator=generator).to(dtype)
        yield Case(label, {"x": x}, {"hidden_size": 8}, reduction=0)

@custom_op("acme_double", cases=cases, tolerance=Tolerance(roundings=1))
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def good(x):
    print("noise")
    return x + x

def wrong(x):
    return x * 3

def leaving(x):
    os._exit(0)

def replacing(x):
    import interposer_testing._checks.comparison as comparison
    import interposer_testing._checks.expectation as expectation
    comparison.compare_value = expectation.compare_value = lambda *a, **k: iter(())
    return x * 3

def looking(x):
    frame = sys._getframe()
    while frame:
        if frame.f_globals.get("__name__", "").startswith("interposer_testing"):
            return x + x
        frame = frame.f_back
    return x * 3

class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for argument in args:
                if isinstance(argument, Lazy):
                    argument.as_subclass(torch.Tensor).copy_(argument.source * 2)
            return function(*args, **(kwargs or {}))

def lazy(x):
    result = torch.empty_like(x).as_subclass(Lazy)
    result.source = x
    return result

def crashing(x):
    if len(x) == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x + x
"""
PLUGIN = """
import os
from interposer import Kernel, OpEntry, hookimpl

INTERPOSER_API = ">=1.0,<2"

@hookimpl
def interposer_records():
    names = os.environ["ACME_KERNELS"].split()
    kernels = [Kernel("acme_double", name, f"acme_ops:{name}") for name in names]
    return [OpEntry("acme_double", "acme_ops:double"), *kernels]
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a runner of the command where ``acme-kernels`` has the kernels of a variable."""
    metadata = tmp_path / "acme_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[interposer.plugins]\nacme = acme_plugin\n")
    (metadata / "RECORD").write_text("acme_ops.py,,\nacme_plugin.py,,\n")
    (tmp_path / "acme_ops.py").write_text(OPS)
    (tmp_path / "acme_plugin.py").write_text(PLUGIN)
    # What is examined first is not the subject here, and takes seconds.
    (tmp_path / "interposer.toml").write_text('isolation = "off"\n')
    variables = {
        "PYTHONPATH": str(tmp_path),
        "INTERPOSER_PLUGINS": "acme-kernels,interposer-cpu",
        "COLUMNS": "200",
    }

    def run(*arguments: str, kernels: str = "good") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables, "ACME_KERNELS": kernels}
        command = ("-m", "interposer_tools", "verify", *arguments)
        return forks().run(*command, cwd=tmp_path, env=environment)

    return run


def test_correct_plugins_exit_with_0_and_wrong_ones_with_1(run: Run, tmp_path: Path) -> None:
    files = [
        f"--{kind}={tmp_path / f'out.{kind}'}" for kind in ("json", "junit", "html", "markdown")
    ]
    right = run("acme-kernels", *files)
    assert right.returncode == 0, right.stderr
    assert "good for kernel 'acme_double' (acme-kernels 1.0): correct" in right.stdout
    assert right.stdout.endswith("correct: 2 correct, 1 declaration sound.\n")
    assert right.stderr == ""
    report = Report.read(tmp_path / "out.json")
    assert (report.state, report.version, report.seed, report.quick) == ("correct", "1.0", 0, False)
    assert ElementTree.parse(tmp_path / "out.junit").getroot().attrib["failures"] == "0"
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "out.markdown").read_text().startswith("# Support matrix: acme-kernels 1.0")

    limits = (
        "--op",
        "acme_double",
        "--case",
        "rows",
        "--seed",
        "5",
        "--quick",
        "--platform",
        "cpu",
    )
    wrong = run("acme-kernels", *limits, kernels="wrong")
    assert wrong.returncode == 1
    assert "Try again: interposer verify acme-kernels " + " ".join(limits) in wrong.stdout
    assert "one row" not in wrong.stdout


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["acme-kernel"],
            "Unknown distribution 'acme-kernel'. Known, nearest first: 'acme-kernels'",
        ),
        (["acme-kernels", "--op", "double"], "Unknown op 'double' of acme-kernels"),
        (["acme-kernels", "--platform", "cuda"], "Unknown platform 'cuda'"),
        (["acme-kernels", "other"], "verify takes one distribution, got acme-kernels, other"),
        (["--merge", "missing.json"], "missing.json: cannot be read as a report"),
        (["--merge", "a.json", "--json", "b.json"], "--merge writes a page"),
        (["acme-kernels", "--csv"], "No such option"),
    ],
)
def test_failed_verifications_exit_with_2(arguments: list[str], message: str, run: Run) -> None:
    process = run(*arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs signals as of POSIX")
def test_a_crash_fails_only_its_candidate(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ("--op", "acme_double", f"--json={file}")
    process = run("acme-kernels", *options, kernels="crashing good")
    assert process.returncode == 1, process.stderr
    report = Report.read(file)
    assert {c.name: c.state for c in report.candidates} == {
        "reference": "correct",
        "crashing": "wrong",
        "good": "correct",
    }
    (crashing,) = report.in_state("wrong")
    (finding,) = crashing.tallies[0].findings
    assert finding.case == "one row"
    assert "the process of the kernel was killed by SIGSEGV" in finding.reason
    assert "in crashing" in finding.traceback
    assert "a trial before it ended the process" in crashing.reasons("not run")


def test_kernels_cannot_reach_their_verdict(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ("--op", "acme_double", "--quick", f"--json={file}")
    cheats = "leaving replacing looking lazy"
    process = run("acme-kernels", *options, kernels=f"{cheats} good")
    assert process.returncode == 1, process.stderr
    report = Report.read(file)
    states = {c.name: c.state for c in report.candidates if c.name != "reference"}
    assert states == {**dict.fromkeys(cheats.split(), "wrong"), "good": "correct"}
    leaving = next(c for c in report.candidates if c.name == "leaving")
    reasons = [finding.reason for finding in leaving.tallies[0].findings]
    assert "the process of the kernel left with exit code 0" in reasons[0]


@pytest.mark.slow
def test_several_processes_give_the_same_report_as_one(run: Run, tmp_path: Path) -> None:
    reports = {}
    for option in ("--seed=0", "--jobs=3"):
        file = tmp_path / "out.json"
        process = run("acme-kernels", option, f"--json={file}", kernels="wrong good")
        assert process.returncode == 1, process.stderr
        candidates = json.loads(file.read_text())["candidates"]
        for candidate in candidates:
            for tally in candidate["tallies"]:
                del tally["seconds"]
        reports[option] = candidates
    assert reports["--jobs=3"] == reports["--seed=0"]
    tallies = [tally for candidate in candidates for tally in candidate["tallies"]]
    run_in_all = sum(tally["passed"] + tally["failed"] for tally in tallies)
    assert run_in_all > 16 * 2, "a third process had nothing to do"


@pytest.mark.skipif(os.name != "posix", reason="needs signals as of POSIX")
@pytest.mark.slow
def test_a_crash_in_one_process_does_not_end_others(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    process = run("acme-kernels", "-j2", f"--json={file}", kernels="crashing good")
    assert process.returncode == 1, process.stderr
    report = Report.read(file)
    states = {c.name: c.state for c in report.candidates if c.kind == "kernel"}
    assert states == {"reference": "correct", "crashing": "wrong", "good": "correct"}
    (crashing,) = report.in_state("wrong")
    assert "was killed by SIGSEGV" in crashing.tallies[0].findings[0].reason


def test_zero_processes_are_refused(run: Run) -> None:
    process = run("acme-kernels", "--jobs", "0")
    assert process.returncode == 2
    assert process.stderr == "error: 0 processes can run nothing. Try: --jobs 1, or more\n"


def test_reports_are_merged(run: Run, tmp_path: Path) -> None:
    ground = Ground("a device", "cpu", "cpu", "x86_64", "Linux", "3.11", "2.11")
    for name, tally in {"a": Tally("numerics", passed=3), "b": Tally("numerics", failed=1)}.items():
        examined_kernel = Examined(
            "kernel", "acme_double", "good", "acme-kernels", "1.0", tallies=(tally,)
        )
        report = Report(
            "acme-kernels", "1.0", ground, name, 0, False, candidates=(examined_kernel,)
        )
        report.write(tmp_path / f"{name}.json")
    process = run("--merge", "a.json", "b.json", "--html", "both.html")
    assert process.returncode == 1  # as one of them says
    assert (tmp_path / "both.html").read_text().count('<th scope="row">good') == 1
    printed = run("--merge", "a.json", "a.json")
    assert printed.returncode == 0
    assert printed.stdout.startswith("# Support matrix: acme-kernels 1.0")
