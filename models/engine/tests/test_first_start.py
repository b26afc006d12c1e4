"""Commands that load a model start the examination of plugins before they import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

_MODEL = str(Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm")

# Ends at the start of the examining process or at the import of torch, whichever comes first.
_PROGRAM = """
import os, sys

def end_at(event, arguments):
    if event == "subprocess.Popen" or event == "import" and arguments[0] == "torch":
        os.write(1, event.encode())
        os._exit(0)

sys.addaudithook(end_at)
from interposer_tools._cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", _MODEL, "--prompt", "a"),
        ("chat", _MODEL),
        ("bench", _MODEL),
        ("serve", _MODEL, "--port", "0"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_both_processes_import_torch_at_the_same_time(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    if arguments[0] == "serve":
        pytest.importorskip("interposer_serve")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=tmp_path,
        env={**os.environ, "INTERPOSER_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "subprocess.Popen", done.stderr
