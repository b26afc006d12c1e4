"""The choices on every described GPU are those of the golden files, which people have read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.forks import forks

pytestmark = pytest.mark.process

pytest.importorskip("triton", reason="needs the package triton, whose kernels are candidates")

ROOT = Path(__file__).parents[1]
WRITER = Path(__file__).with_name("golden_choices.py")
KEPT = "INTERPOSER_CACHE_DIR"


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.landing(2)
@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu"])
def test_choices_equal_the_reviewed_snapshot(platform: str, tmp_path: Path) -> None:
    golden = ROOT / "platforms" / platform / "tests/golden"
    # A policy of whoever runs the tests would be told, too.
    variables = {
        name: value
        for name, value in os.environ.items()
        if name == KEPT or not name.startswith("INTERPOSER_")
    }
    arguments = (WRITER, f"interposer-{platform}", tmp_path / "now")
    done = forks().run(*arguments, env=variables, cwd=tmp_path, timeout=540)
    assert done.returncode == 0, done.stderr
    now, then = read(tmp_path / "now"), read(golden)
    mend = f"once you have read what is chosen now: python {WRITER} {arguments[1]} {golden}"
    assert then
    assert now.keys() == then.keys(), mend
    assert [name for name in then if now[name] != then[name]] == [], mend
