"""The snapshot of public names is up to date, and the site of the documentation builds."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ROOT / "docs" / "public-names.txt"


def test_public_names_equal_the_snapshot() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "_site.py"))["public_names"]().splitlines()
    kept = NAMES.read_text(encoding="utf-8").splitlines()
    new, gone = sorted({*names} - {*kept}), sorted({*kept} - {*names})
    assert names == kept, f"new: {new}, gone: {gone}. Try: python docs/_site.py"


@pytest.mark.process
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A broken link, a missing heading or a public name without a docstring is a warning."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
