"""The figures, the table and the losses in the documentation are those of the committed results."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.slow
def test_diagrams_equal_the_output_of_their_script() -> None:
    command = [sys.executable, str(ROOT / "docs/figures/diagrams.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_performance_page_states_the_committed_results() -> None:
    results = runpy.run_path(str(ROOT / "benchmarks/plot_results.py"))
    for file, content in results["figures"]().items():
        advice = f"{file.name} differs. Try: python benchmarks/plot_results.py"
        assert file.read_text(encoding="utf-8") == content, advice
