"""A plugin that exceeds the time limit of its examination: the error names a setting that works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]

_ERROR = """
from interposer import current_registry
print(current_registry().plugins.failed[0].error)
"""
_LIMIT = "from interposer import effective_config; print(effective_config().probe_seconds)"


def output(program: str, folder: Path, settings: str) -> str:
    """Run a program in ``folder`` with a project file, and return what it prints."""
    (folder / "interposer.toml").write_text(settings)
    variables = {"PYTHONPATH": str(folder), "INTERPOSER_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_error_of_a_late_plugin_names_a_setting_that_raises_the_limit(tmp_path: Path) -> None:
    (tmp_path / "acme_late.py").write_text("import time\ntime.sleep(1000)\n")
    info = tmp_path / "acme_late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-late\nVersion: 1.0\n")
    (info / "RECORD").write_text("acme_late.py,,\n")
    (info / "entry_points.txt").write_text("[interposer.plugins]\nacme-late = acme_late\n")
    error = output(_ERROR, tmp_path, 'plugins = ["acme-late"]\nprobe_seconds = 0.2\n')
    assert "did not return within 0.2 s" in error
    advice = re.search(r"write (probe_seconds = \d+) into interposer\.toml", error)
    assert advice is not None, error
    assert output(_LIMIT, tmp_path, advice[1]) == "60.0"
