"""What is chosen on every described GPU is what the golden files say, which people have read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton, whose kernels are candidates")

WRITER = Path(__file__).with_name("golden_choices.py")
GOLDEN = Path(__file__).with_name("golden")


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the writer writes, in a process whose policy nobody has set."""
    folder = tmp_path_factory.mktemp("golden")
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("INTERPOSER_") or name == "INTERPOSER_CACHE_DIR"
    }
    done = subprocess.run(
        [sys.executable, str(WRITER), str(folder)],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    return read(folder)


@pytest.mark.xdist_group("golden_choices")
def test_choices_are_those_that_people_have_read(written: dict[str, str]) -> None:
    mend = f"to take what is chosen now: python {WRITER} {GOLDEN}"
    assert list(written) == sorted(path.name for path in GOLDEN.iterdir()), mend
    differing = [name for name, text in read(GOLDEN).items() if written[name] != text]
    assert not differing, mend


def chosen(name: str, kind: str) -> dict[str, str]:
    """Return subject to chosen candidate of one kind in a golden file."""
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    pattern = rf"^{kind} '(\S+)' .*\n  -> (\S+) "
    return dict(re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "op", "kernel"),
    [
        ("h100-plain", "rms_norm", "rms_norm_triton"),
        ("h100-plain", "linear", "reference"),
        ("h100-fp8", "fp8_linear", "fp8_linear_scaled_mm"),
        ("rtx4090-fp8", "fp8_linear", "fp8_linear_scaled_mm"),
        ("a100-fp8", "fp8_linear", "fp8_linear_triton"),
        ("h100-int4", "w4a16_linear", "w4a16_linear_triton"),
        ("b200-mxfp4", "mxfp4_linear", "mxfp4_linear_triton"),
    ],
)
def test_what_is_to_be_chosen_is(name: str, op: str, kernel: str) -> None:
    assert chosen(name, "kernel")[op] == kernel
