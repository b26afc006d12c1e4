"""A command says in one line that it does not use a wrong kernel of an installed plugin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.forks import forks

pytestmark = pytest.mark.process

PLUGIN = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records():
    return [Kernel("rms_norm", "rms_norm_acme", "acme_norms:rms_norm", score=1000.0)]
"""
KERNEL = """
def rms_norm(x, weight, eps):
    return x * weight
"""
WARNING = (
    "The kernel 'rms_norm_acme' of acme 1.0 is not used for 'rms_norm': "
    "departs from the reference of 'rms_norm': "
)
NEXT = "Try: interposer verify acme --op rms_norm"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Install a plugin with a wrong kernel, and return variables of a process that finds it."""
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[interposer.plugins]\nacme = acme_plugin\n")
    (info / "RECORD").write_text("acme_plugin.py,,\nacme_norms.py,,\n")
    (tmp_path / "acme_plugin.py").write_text(PLUGIN)
    (tmp_path / "acme_norms.py").write_text(KERNEL)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "INTERPOSER_CACHE_DIR": str(cache),
    }


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("command", "options"), [("run", ("--prompt", "x", "--max-new-tokens", "1")), ("chat", ())]
)
def test_a_wrong_kernel_is_named_once(
    environment: dict[str, str], chat_folder: Path, command: str, options: tuple[str, ...]
) -> None:
    arguments = ("-m", "interposer_tools", command, str(chat_folder), *options)
    process = forks().run(*arguments, env=environment, input="")
    assert process.returncode == 0, process.stderr
    warnings = [line for line in process.stderr.splitlines() if "rms_norm_acme" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(WARNING)
    assert warnings[0].endswith(NEXT)
    assert "rms_norm_acme" not in process.stdout


def test_a_server_names_a_wrong_kernel(environment: dict[str, str], chat_folder: Path) -> None:
    command = ("-m", "interposer_tools", "serve", str(chat_folder), "--port=0")
    process = forks().run(*command, f"--adapter=x={chat_folder}", env=environment)
    assert process.returncode == 1
    assert WARNING in process.stderr
