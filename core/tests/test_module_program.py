"""``python -m interposer`` runs the command line, or names the package with it."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import version

import pytest


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("interposer_tools", reason="needs the command line")
    monkeypatch.setattr(sys, "argv", ["interposer", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("interposer", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"interposer {version('interposer')}\n"


def test_without_the_command_line_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "interposer_tools", None)
    with pytest.raises(SystemExit, match="Try: pip install --find-links dist interposer-tools"):
        runpy.run_module("interposer", run_name="__main__")
