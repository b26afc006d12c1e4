"""Whoever follows a choice passes few files and frames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
# The most files, the most frames, and the most frames of the selection's own modules.
BOUNDS = {
    # One of the files is the family of the model.
    "load to kernel": (13, 23, 6),
    "token to kernel": (8, 10, 0),
    "entry point to selection": (6, 10, 1),
}


@pytest.fixture(scope="module")
def paths() -> dict[str, list[tuple[str, str]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "call_paths.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, list[tuple[str, str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", BOUNDS)
def test_a_path_is_short(paths: dict[str, list[tuple[str, str]]], name: str) -> None:
    path = paths[name]
    most_files, most_frames, most_chosen = BOUNDS[name]
    assert 0 < len({file for file, _ in path}) <= most_files
    assert len(path) <= most_frames
    assert sum("/_selection/" in file for file, _ in path) <= most_chosen
