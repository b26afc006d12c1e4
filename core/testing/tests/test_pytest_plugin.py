"""One marked test becomes a test of each candidate, aspect and dtype that a distribution has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.forks import forks

pytest_plugins = "pytester"
pytestmark = pytest.mark.process

# A plugin of installed metadata, without pip: what lies in the folder of the test is on the path.
OPS = """
import torch
from interposer import Case, Tolerance, Verdict, custom_op

def cases(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    for label, shape in {"rows": (4, 8), "one row": (1, 8), "five": (5, 8), "six": (6, 8)}.items():
        x = torch.randn(shape, generator=generator).to(dtype)
        yield Case(label, {"x": x}, {"hidden_size": 8}, reduction=0)

@custom_op("acme_double", cases=cases, tolerance=Tolerance(roundings=1))
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def good(x):
    return x + x

def wrong(x):
    y = x + x
    y[0, 1] += 1
    return y
"""
PLUGIN = """
from interposer import Kernel, OpEntry, Requires, hookimpl

INTERPOSER_API = ">=1.0,<2"

@hookimpl
def interposer_records():
    bfloat16 = Requires(dtypes=("bfloat16",))
    return [
        OpEntry("acme_double", "acme_ops:double"),
        Kernel("acme_double", "good", "acme_ops:good", requires=bfloat16),
        Kernel("acme_double", "wrong", "acme_ops:wrong", requires=bfloat16),
        Kernel("acme_double", "elsewhere", "acme_ops:good", platform="cuda"),
    ]
"""
TEST = """
import pytest

@pytest.mark.conformance({marker})
def test_conformance(trial):
    trial.verify()
"""


@pytest.fixture
def acme(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a project in which the distribution ``acme-kernels`` is installed."""
    pytester.makepyfile(acme_ops=OPS, acme_plugin=PLUGIN)
    metadata = pytester.mkdir("acme_kernels-1.0.dist-info")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[interposer.plugins]\nacme = acme_plugin\n")
    (metadata / "RECORD").write_text("acme_ops.py,,\nacme_plugin.py,,\n")
    # What is examined first is not the subject here, and takes seconds.
    (pytester.path / "interposer.toml").write_text('isolation = "off"\n')
    forks()  # starts without this folder on its path
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    monkeypatch.setenv("INTERPOSER_PLUGINS", "acme-kernels,interposer-cpu")
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    return pytester


def run(project: pytest.Pytester, marker: str, *options: str) -> pytest.RunResult:
    project.makepyfile(test_acme=TEST.format(marker=marker))
    return run_all(project, "-rs", "-v", *options)


def run_all(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run pytest as ``runpytest_subprocess`` does, in a fork of a process that has torch."""
    command = ("-m", "pytest", f"--basetemp={project.path / 'basetemp'}", "-p", "no:cacheprovider")
    process = forks().run(*command, *options, cwd=project.path)
    out, err = process.stdout.splitlines(), process.stderr.splitlines()
    return pytest.RunResult(process.returncode, out, err, duration=0.0)


@pytest.mark.slow
def test_each_candidate_aspect_and_dtype_is_a_test(acme: pytest.Pytester) -> None:
    process = run(acme, '"acme-kernels", op="acme_double"', "-k", "numerics or elsewhere")
    # Of each kernel two dtypes are refused, and what is for another platform does not run.
    process.assert_outcomes(passed=4, failed=1, skipped=5)
    process.stdout.fnmatch_lines(
        [
            "*[[]kernel-acme_double-acme-kernels/reference-numerics-float32] PASSED*",
            "*[[]kernel-acme_double-acme-kernels/good-numerics-float32] SKIPPED*",
            "*[[]kernel-acme_double-acme-kernels/good-numerics-bfloat16] PASSED*",
            "*[[]kernel-acme_double-acme-kernels/wrong-numerics-bfloat16] FAILED*",
        ]
    )
    text = process.stdout.str()
    assert "refused: needs dtype bfloat16, got float16 (4 times)" in text
    assert "needs the platform cuda, this is cpu" in text
    assert (
        "WRONG wrong for kernel 'acme_double', numerics: 4 of 4 trials failed; the first 3:" in text
    )
    assert "Try again: interposer verify acme-kernels --op acme_double --case rows --seed 0" in text
    others = text[text.index("The others:") :]
    assert "case 'six': output 0:" in others
    assert "case 'rows'" not in others.partition("short test summary")[0]


def test_options_override_the_marker(acme: pytest.Pytester) -> None:
    options = ("-k", "wrong and numerics and bfloat16", "--conformance-seed", "7")
    process = run(acme, '"acme-kernels", seed=3', *options)
    assert "--seed 7 --quick" in process.stdout.str()
    full = run(acme, '"acme-kernels", quick=True', *options, "--conformance-full")
    assert "--seed 7\n" in full.stdout.str()
    assert "--quick" not in full.stdout.str()


@pytest.mark.slow
def test_an_unknown_platform_is_an_error(acme: pytest.Pytester) -> None:
    process = run(acme, '"acme-kernels"', "--conformance-platform", "cuda")
    process.assert_outcomes(errors=1)
    assert "Unknown platform 'cuda'" in process.stdout.str()


WRONG = {
    '"acme-kernel"': "Unknown distribution 'acme-kernel'. Known, nearest first: 'acme-kernels'",
    '"acme-kernels", op="double"': "Unknown op 'double' of acme-kernels",
    '"acme-kernels", ops="double"': "unexpected keyword argument 'ops'",
    "": "missing 1 required positional argument: 'distribution'",
}


def test_a_wrong_marker_is_an_error_of_collection(acme: pytest.Pytester) -> None:
    sources = {f"test_wrong_{n}": TEST.format(marker=m) for n, m in enumerate(WRONG)}
    sources["test_bare"] = TEST.format(marker='"acme-kernels"').replace("(trial)", "()")
    acme.makepyfile(**sources)
    process = run_all(acme)
    process.assert_outcomes(errors=len(sources))
    text = process.stdout.str()
    for message in (*WRONG.values(), "Try: def test_conformance(trial): trial.verify()"):
        assert message in text
    assert "Traceback" not in text


def test_torch_is_not_imported_without_a_marked_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_light(request):
            assert request.config.pluginmanager.hasplugin("interposer")
            assert not {"torch", "numpy", "interposer_testing.cases"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_plugin_alone_is_light() -> None:
    program = "import sys, interposer_testing._pytest_plugin; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("False\n", "")


def test_the_options_and_the_marker_are_documented(pytester: pytest.Pytester) -> None:
    options = pytester.runpytest_subprocess("--help").stdout.str()
    for option in ("--conformance-full", "--conformance-platform", "--conformance-seed"):
        assert option in options
    assert "@pytest.mark.conformance(distribution" in (
        pytester.runpytest_subprocess("--markers").stdout.str()
    )
