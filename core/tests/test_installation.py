"""Files that keep imports from working are named: by the library, and by the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interposer_sandbox import endless_entry_points, unreadable_entry_points

LIBRARY = (
    "try:\n"
    "    from interposer_models import load\n"
    "except ImportError as error:\n"
    "    print(f'{type(error).__name__}: {error}')\n"
)
MODEL = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
WAYS = {
    "library": ["-c", LIBRARY],
    "command": ["-m", "interposer_tools", "run", str(MODEL), "--prompt", "a"],
}


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00[interposer.plugins]")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def failing_backend(folder: Path) -> None:
    """Let a distribution add a device to torch whose library is missing."""
    points = "[torch.backends]\nboard = board_backend:register\n"
    (folder / "acme-1.0.dist-info" / "entry_points.txt").write_text(points)
    (folder / "board_backend.py").write_text("raise OSError('libboard.so: no such file')\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on the path, with the metadata of a distribution."""
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    return metadata


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (binary, "entry_points.txt: 'utf-8' codec"),
        (link_to_itself, "entry_points.txt: .*symbolic links"),
        (os.mkfifo, "entry_points.txt: it is neither a file nor a folder"),
        (Path.mkdir, ""),
        (Path.touch, ""),
    ],
)
def test_entry_points_that_cannot_be_read_are_named(
    make: Callable[[Path], None], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder / "entry_points.txt")
    monkeypatch.setattr(sys, "path", [str(folder.parent), "/missing"])
    faults = unreadable_entry_points()
    assert len(faults) == bool(reason)
    assert not faults or re.search(reason, faults[0])
    assert endless_entry_points() == (faults if "neither" in reason else [])


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: binary(path / "acme-1.0.dist-info" / "entry_points.txt"), "'utf-8' codec"),
        (
            lambda path: os.mkfifo(path / "acme-1.0.dist-info" / "entry_points.txt"),
            "is neither a file nor a folder",
        ),
        (
            lambda path: (path / "interposer_ops.py").touch(),
            "is imported as 'interposer_ops' in place of interposer-ops",
        ),
        (lambda path: (path / "interposer.py").touch(), "'interposer' is imported from"),
        (failing_backend, "OSError: libboard.so: no such file\nTry: reinstall or uninstall"),
    ],
    ids=["binary", "FIFO", "shadow", "shadowed core", "torch backend"],
)
def test_a_module_that_cannot_be_imported_is_named(
    way: str, make: Callable[[Path], None], reason: str, folder: Path
) -> None:
    make(folder.parent)
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    completed = subprocess.run(
        [sys.executable, *WAYS[way]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = completed.stdout if way == "library" else completed.stderr
    assert reason in output, completed
    assert str(folder.parent) in output
    assert "Try: " in output
    assert "Traceback" not in completed.stderr
