"""The figures of the documentation are what their scripts draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def draw(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", ["benchmarks/plot_results.py", "docs/figures/diagrams.py"])
def test_figures_are_what_their_script_draws(script: str) -> None:
    done = draw(script, "--check")
    assert done.returncode == 0, done.stderr


def test_every_figure_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    figures = {figure.name for figure in (ROOT / "docs" / "figures").glob("*.svg")}
    assert figures
    assert {name for name in figures if f"figures/{name}" not in pages} == set()
