"""Importing the core is inert, and its command starts without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

# Runs before and after the import, in a process of its own.
PROBE = """
import os, sys, threading

HEAVY = {{"pluggy", "pydantic", "torch", "transformers", "typer"}}
asked = []

class Recorder(dict):
    def __getitem__(self, name):
        asked.append(name)
        return super().__getitem__(name)
    def get(self, name, default=None):
        asked.append(name)
        return super().get(name, default)
    def __contains__(self, name):
        asked.append(name)
        return super().__contains__(name)

def threads():
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()

os.environ = Recorder(os.environ)
before = threads()
{statement}
# The sandbox stands below the core; what it has is loaded on first use as well.
tops = {{name.partition(".")[0] for name in sys.modules}} - {{"interposer_sandbox"}}
print("heavy", sorted(tops & HEAVY))
print("others", sorted(top for top in tops if top.startswith("interposer_")))
print("asked", sorted(name for name in asked if name.startswith("INTERPOSER_")))
print("threads", threads() - before)
"""

INERT = ["heavy []", "others []", "asked []", "threads 0"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def probe(statement: str, **variables: str) -> list[str]:
    done = run("-c", PROBE.format(statement=statement), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_is_inert() -> None:
    assert probe("import interposer") == INERT


def test_import_reads_no_variable() -> None:
    assert probe("import interposer", INTERPOSER_FOO="nonsense") == INERT


@pytest.mark.parametrize(
    "statement",
    [
        "import pydantic",
        "sys.modules['interposer_x'] = sys",
        "os.getenv('INTERPOSER_X')",
        "import time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ],
)
def test_probe_notices(statement: str) -> None:
    assert probe(statement) != INERT


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_command_starts_without_torch(option: str) -> None:
    done = run("-X", "importtime", "-m", "interposer_tools", option)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    imported = set(re.findall(r"^import time:.*\| +(\w+)", done.stderr, re.MULTILINE))
    assert "interposer" in imported
    assert imported.isdisjoint({"torch", "transformers"})


def test_no_public_name_loads_the_compiler() -> None:
    """Loading torch's takes a second, which resolving a model must not cost."""
    program = "import sys, interposer\nfor name in interposer.__all__: getattr(interposer, name)\n"
    done = run(
        "-c", program + "print(sorted({'torch._dynamo', 'torch._inductor'} & set(sys.modules)))"
    )
    assert done.stdout == "[]\n", done.stderr
