"""What is chosen on every described GPU is what the golden files say, which people have read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton, whose kernels are candidates")

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("golden")
COMMAND = [sys.executable, str(ROOT / "tests/golden_choices.py"), "interposer-rocm"]


@pytest.mark.xdist_group("golden_choices_of_rocm")
def test_choices_are_those_that_people_have_read(tmp_path: Path) -> None:
    # A policy of whoever runs the tests would be told, too.
    set_by_user = {name for name in os.environ if name.startswith("INTERPOSER_")}
    variables = {name: os.environ[name] for name in os.environ.keys() - set_by_user}
    if "INTERPOSER_CACHE_DIR" in set_by_user:
        variables["INTERPOSER_CACHE_DIR"] = os.environ["INTERPOSER_CACHE_DIR"]
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "now")],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    now, then = ({p.name: p.read_text() for p in f.iterdir()} for f in (tmp_path / "now", GOLDEN))
    mend = f"to take what is chosen now: {' '.join([*COMMAND, str(GOLDEN)])}"
    assert len(then) == 20
    assert now.keys() == then.keys(), mend
    assert [name for name in then if now[name] != then[name]] == [], mend


@pytest.mark.parametrize(
    ("name", "op", "kernel"),
    [
        ("mi300x-plain", "rms_norm", "rms_norm_triton"),
        ("mi300x-plain", "linear", "reference"),
        ("mi250x-fp8", "fp8_linear", "fp8_linear_triton"),
        ("mi300x-fp8", "fp8_linear", "fp8_linear_hipblaslt_fnuz"),
        ("mi355x-fp8", "fp8_linear", "fp8_linear_hipblaslt"),
        ("rx7900xtx-fp8", "fp8_linear", "fp8_linear_triton"),
        ("rx9070xt-fp8", "fp8_linear", "fp8_linear_hipblaslt"),
        ("mi300x-int4", "w4a16_linear", "w4a16_linear_triton"),
        ("mi355x-mxfp4", "mxfp4_linear", "mxfp4_linear_triton"),
    ],
)
def test_what_is_to_be_chosen_is(name: str, op: str, kernel: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    chosen = re.findall(rf"^kernel '{op}' .*\n  -> (\S+) ", text, re.MULTILINE)
    assert {*chosen} == {kernel}
