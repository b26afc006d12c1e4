"""The command ``interposer`` in the process of a test."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from interposer_tools import main

__all__ = ["Command"]


class Command:
    """Calls the command; returns its exit code and what it wrote to the output and as errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["interposer", *map(str, arguments)])
        with self.monkeypatch.context() as patched:
            # A command freezes what it imported; here, what earlier tests left open as well, which
            # would be found no more.
            patched.setattr(gc, "freeze", lambda: None)
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = self.capsys.readouterr()
        return int(ended.value.code or 0), out, err
