"""``interposer verify`` judges the tag of a wheel that holds native code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import packaging.tags
import pytest
from tests.forks import forks
from tests.hostile.wheel import PURE, Wheel

from interposer_testing import Report, Tally

pytestmark = pytest.mark.process

PLUGIN = b"""
from interposer import PlatformEntry, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records():
    return [PlatformEntry("acme-board", "acme_board.platform:Board", explicit=True)]
"""
PLATFORM = b"""
from interposer import Platform, Verdict


class Board(Platform):
    name, device_type = "acme-board", "cpu"

    @classmethod
    def probe(cls):
        return Verdict.refuse("there is no board")

    def devices(self):
        return []

    def capability(self, device):
        raise NotImplementedError

    def dtypes(self, device):
        return []
"""
FILES = {
    "acme_board/__init__.py": b"",
    "acme_board/plugin.py": PLUGIN,
    "acme_board/platform.py": PLATFORM,
}
HERE = f"py3-none-{next(iter(packaging.tags.platform_tags()))}"
LIBRARY = {"acme_board/libboard.so": b"\x7fELF"}

Verified = Callable[..., tuple[subprocess.CompletedProcess[str], Tally]]


@pytest.fixture
def verified(tmp_path: Path) -> Verified:
    """Return a function that verifies an installed wheel and returns the process and its tally."""

    def run(
        tag: str, native: Mapping[str, bytes] = {}, **changed: str
    ) -> tuple[subprocess.CompletedProcess[str], Tally]:
        plugins = {"acme-board": "acme_board.plugin"}
        wheel = Wheel("acme-board", "1.0", {**FILES, **native}, plugins, tag=tag)
        site = tmp_path / "site"
        options = ("--quiet", "--no-index", "--no-deps", "--target", site)
        install = [sys.executable, "-m", "pip", "install", *options, wheel.write(tmp_path)]
        subprocess.run([*map(str, install)], check=True, timeout=300)
        for name, text in changed.items():
            (site / wheel.info / name).write_text(text)
        (tmp_path / "interposer.toml").write_text('isolation = "off"\n')
        environment: dict[str, Any] = {
            **os.environ,
            "PYTHONPATH": str(site),
            "INTERPOSER_PLUGINS": "acme-board,interposer-cpu",
        }
        command = ("-m", "interposer_tools", "verify", "acme-board", "--json=report.json")
        process = forks().run(*command, cwd=tmp_path, env=environment)
        report = Report.read(tmp_path / "report.json")
        (module,) = [c for c in report.candidates if c.kind == "module"]
        (tally,) = [tally for tally in module.tallies if tally.aspect == "wheel"]
        return process, tally

    return run


@pytest.mark.slow
def test_native_code_in_a_wheel_for_any_machine_is_wrong(verified: Verified) -> None:
    more = {**LIBRARY, "acme_board/board.abi3.so": b"", "acme_board/other.so.2": b""}
    process, tally = verified(PURE, more)
    assert (process.returncode, tally.state) == (1, "wrong")
    (finding,) = tally.findings
    assert (finding.check, finding.where) == ("wheel", "file 'acme_board/board.abi3.so'")
    message = "it is native code, and so are 2 more, but WHEEL says 'Root-Is-Purelib: true' and "
    assert finding.reason.startswith(f"{message}'Tag: py3-none-any', so any machine")
    assert "Try: use a build backend that sets the platform tag" in finding.reason
    assert "WRONG module acme_board.plugin, wheel: 1 of 1 trial failed" in process.stdout
    assert finding.reason in process.stdout


def test_native_code_in_a_wheel_for_this_machine_is_correct(verified: Verified) -> None:
    process, tally = verified(HERE, LIBRARY)
    assert (process.returncode, tally.state) == (0, "correct")


def test_a_shared_library_in_a_pure_python_wheel_is_wrong(verified: Verified) -> None:
    text = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {HERE}\n"
    process, tally = verified(HERE, LIBRARY, WHEEL=text)
    assert process.returncode == 1
    (finding,) = tally.findings
    assert "but WHEEL says 'Root-Is-Purelib: true', so" in finding.reason


@pytest.mark.slow
def test_an_editable_installation_is_not_judged_by_its_tag(
    verified: Verified, tmp_path: Path
) -> None:
    origin = {"url": (tmp_path / "site").as_uri(), "dir_info": {"editable": True}}
    process, tally = verified(PURE, LIBRARY, **{"direct_url.json": json.dumps(origin)})
    assert (process.returncode, tally.state) == (0, "not run")
    assert tally.not_run == {"an editable installation has no wheel of its code": 1}


@pytest.mark.slow
def test_installations_without_a_wheel_are_not_checked(verified: Verified) -> None:
    process, tally = verified(PURE, LIBRARY, WHEEL="")
    assert (process.returncode, tally.state) == (0, "not run")
    assert tally.not_run == {"it was not installed from a wheel": 1}
