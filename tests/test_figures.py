"""The figures of the documentation are what their scripts draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("script", ["benchmarks/plot_results.py", "docs/figures/diagrams.py"])
def test_figures_are_what_their_script_draws(script: str) -> None:
    command = [sys.executable, str(ROOT / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
