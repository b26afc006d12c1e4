"""The command ends with 0, or with one message and 1; what others add to it cannot break it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import importlib_metadata
import pytest

from interposer.hookspecs import GROUP

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a runner of the command, in an empty folder that is first on the path."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "interposer", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., None]:
    """Return what makes a distribution with entry points and modules an installed one."""

    def install(name: str, entry_points: str, **modules: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)

    return install


def installed() -> str:
    return ",".join(sorted({point.name for point in importlib_metadata.entry_points(group=GROUP)}))


def test_help_names_the_commands(run: Run) -> None:
    for option in ("--help", "-h"):
        done = run(option)
        assert done.returncode == 0, done.stderr
        assert "plugins" in done.stdout


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"interposer {version('interposer')}\n")


def test_disabling_what_is_not_installed_is_one_warning(run: Run) -> None:
    done = run("plugins", INTERPOSER_DISABLE="opps")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: The configuration disables 'opps'")


def test_plugins_lists_what_is_disabled(run: Run) -> None:
    done = run("plugins", INTERPOSER_DISABLE=installed())
    assert done.returncode == 0, done.stderr
    assert "ops (interposer-ops): disabled" in done.stdout.splitlines()


GOOD = """
from interposer.hookspecs import hookimpl
from interposer.records import OpEntry

@hookimpl
def interposer_records():
    return [OpEntry("double", "acme_plugin:double")]
"""


def test_plugins_as_text_and_as_json(run: Run, install: Callable[..., None]) -> None:
    install("acme", f"[{GROUP}]\nnorms = acme_plugin\n", acme_plugin=GOOD)
    disabled = installed()
    text = run("plugins", INTERPOSER_DISABLE=disabled)
    assert text.returncode == 0, text.stderr
    assert "norms (acme 1.0): 1 OpEntry" in text.stdout.splitlines()
    facts = json.loads(run("plugins", "--json", INTERPOSER_DISABLE=disabled).stdout)
    assert facts["plugins"] == [
        {"name": "norms", "distribution": "acme", "version": "1.0", "records": {"OpEntry": 1}}
    ]
    assert facts["failed"] == []
    assert ",".join(sorted(plugin["name"] for plugin in facts["disabled"])) == disabled


def test_a_failed_plugin_is_shown_with_its_traceback_and_exit_code_1(
    run: Run, install: Callable[..., None]
) -> None:
    install("acme", f"[{GROUP}]\nnorms = acme_plugin\n", acme_plugin="import acme_of_nowhere\n")
    text = run("plugins", INTERPOSER_DISABLE=installed())
    assert text.returncode == 1
    assert "FAILED Plugin 'norms' of acme: its import raised ModuleNotFoundError" in text.stdout
    assert "    ModuleNotFoundError: No module named 'acme_of_nowhere'" in text.stdout
    assert text.stderr == ""
    done = run("plugins", "--json", INTERPOSER_DISABLE=installed())
    assert done.returncode == 1
    (failure,) = json.loads(done.stdout)["failed"]
    assert (failure["name"], failure["distribution"]) == ("norms", "acme")
    assert "INTERPOSER_DISABLE=norms" in failure["error"]
    assert failure["traceback"].startswith("Traceback")


def test_an_expected_error_is_one_message_without_a_traceback(run: Run) -> None:
    done = run("plugins", INTERPOSER_PLATFROM="cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Unknown environment variable 'INTERPOSER_PLATFROM'")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_command_or_option_is_a_usage_error(run: Run) -> None:
    for wrong in (["plugin"], ["plugins", "--jsno"]):
        done = run(*wrong)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


BROKEN = {
    "raises": "raise OSError('[/bold] no such library')\n",
    "leaves": "raise SystemExit(7)\n",
    "lacks": "",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_a_broken_command_does_not_break_the_others_and_says_why_when_run(
    source: str, run: Run, install: Callable[..., None]
) -> None:
    install("acme", "[interposer.commands]\ntune = acme_commands:tune\n", acme_commands=source)
    overview = run("--help")
    assert overview.returncode == 0, overview.stderr
    assert "tune" in overview.stdout
    assert "cannot be loaded; run it to see why" in overview.stdout
    done = run("tune", "--fast", "model")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The command 'tune' cannot be loaded: ")
    assert len(done.stderr.splitlines()) == 1


TUNE = 'def tune():\n    """Tune it."""\n    print("tuned")\n\n\nplugins = tune\n'


def test_a_command_of_another_distribution_runs(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\ntune = acme_commands:tune\n", acme_commands=TUNE)
    assert "Tune it." in run("--help").stdout
    assert run("tune").stdout == "tuned\n"


def test_a_command_claimed_twice_is_neither(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\ntune = acme_commands:tune\n", acme_commands=TUNE)
    install("zeta", "[interposer.commands]\ntune = zeta_commands:tune\n", zeta_commands=TUNE)
    done = run("tune")
    assert done.returncode == 1
    assert "it is claimed by acme_commands:tune and by zeta_commands:tune" in done.stderr


def test_nobody_replaces_a_command_of_the_core(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\nplugins = acme_commands:plugins\n", acme_commands=TUNE)
    done = run("plugins", INTERPOSER_DISABLE=installed())
    assert done.returncode == 0, done.stderr
    assert "tuned" not in done.stdout
