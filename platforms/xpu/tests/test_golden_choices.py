"""What is chosen on every described GPU is what the golden files say, which people have read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton, whose kernels are candidates")

WRITER = Path(__file__).with_name("golden_choices.py")
GOLDEN = Path(__file__).with_name("golden")
KINDS = ("fp8", "int4", "mxfp4", "plain")
DEVICES = ("arc140v", "b580", "max1550")


@pytest.mark.xdist_group("golden_choices_xpu")
def test_choices_are_those_that_people_have_read(tmp_path: Path) -> None:
    # A policy of whoever runs the tests must not decide.
    policy = {name for name in os.environ if name.startswith("INTERPOSER_")}
    kept = policy - {"INTERPOSER_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, WRITER, tmp_path / "written"],
        env={name: value for name, value in os.environ.items() if name not in kept},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in (tmp_path / "written").iterdir()}
    assert sorted(written) == sorted(f"{d}-{kind}.txt" for d in DEVICES for kind in KINDS)
    golden = {path.name: path.read_text() for path in GOLDEN.iterdir()}
    mend = f"read the differences, then: {WRITER} {GOLDEN}"
    assert sorted(written) == sorted(golden), mend
    assert [name for name, text in written.items() if golden[name] != text] == [], mend


@pytest.mark.parametrize(
    ("kind", "op", "kernel", "refused"),
    [
        ("plain", "rms_norm", "rms_norm_triton", "rms_norm_ipex"),
        ("plain", "linear", "reference", ""),
        ("fp8", "fp8_linear", "fp8_linear_triton", "fp8_linear_fp8_gemm"),
        ("int4", "w4a16_linear", "w4a16_linear_triton", "w4a16_linear_int4_gemm"),
        ("mxfp4", "mxfp4_linear", "mxfp4_linear_triton", ""),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_to_be_chosen_is(
    device: str, kind: str, op: str, kernel: str, refused: str
) -> None:
    text = (GOLDEN / f"{device}-{kind}.txt").read_text()
    subjects = [part for part in text.split("\n\n") if part.startswith(f"kernel {op!r} ")]
    assert subjects
    for subject in subjects:
        assert f"-> {kernel} (interposer-ops" in subject
        assert not refused or f"not {refused} (interposer-xpu" in subject
