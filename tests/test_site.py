"""Public names are the ones that are written down, so that none comes or goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_public_names_are_those_of_the_snapshot() -> None:
    command = [sys.executable, str(ROOT / "docs" / "_site.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
