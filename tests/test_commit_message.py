"""Commit messages follow the rule of CONTRIBUTING.md, and each fault comes with a remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from tests import commit_message
from tests.commit_message import faults

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "text",
    [
        "ops: Add relu_and_mul\n\nReGLU models need the op.\n",
        "core, sandbox: Rename five functions\n\nTheir names said nothing.\n",
        "engine: Plan, build and load in three modules\n\nOne file did all of it.\n",
        "models: Merge the new families\n\nSeed-OSS and its tests.\n",
        f"ops: Add {'x' * 63}\n\nThe subject has 72 characters.\n",
        "ops: Fix a rounding\n# On branch main\n\nTies went to odd.\n# ---- >8 ----\ndiff\n",
    ],
)
def test_a_good_message_has_no_faults(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Add an op", "'area: Verb the thing'"),
        ("ops:Add an op", "'area: Verb the thing'"),
        ("Merge branch 'work'", "'area: Verb the thing'"),
        ("ops: Added an op", "begins with 'Added'.*Try: Add"),
        ("ops: Adds an op", "begins with 'Adds'.*Try: Add"),
        ("ops: Renaming of an op", "begins with 'Renaming'.*Try: Rename"),
        ("ops: The op relu_and_mul", "begins with 'The'"),
        ("ops: A new op", "begins with 'A'"),
        ("ops: add an op", "begins with 'add'.*Try: Add"),
        ("ops: relu_and_mul", "begins with 'relu_and_mul'.*Try: Add, Fix, Rename"),
        (f"ops: Add {'x' * 64}", "1 characters too long"),
    ],
)
def test_a_wrong_subject_is_refused(subject: str, fault: str) -> None:
    (found,) = faults(f"{subject}\n\nWhy.\n")
    assert re.search(fault, found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ops: Add an op\n", "no body"),
        ("ops: Add an op\n\n# a comment of git\n", "no body"),
        ("ops: Add an op\nWhy.\n", "not blank"),
        ("", "no body"),
    ],
)
def test_a_message_without_a_body_is_refused(text: str, fault: str) -> None:
    assert any(fault in found for found in faults(text))


@pytest.mark.process
def test_the_hook_refuses_a_wrong_message(tmp_path: Path) -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = [hook for hook in repository["hooks"] if hook.get("stages") == ["commit-msg"]]
    assert hook["entry"].split()[1] == Path(commit_message.__file__).relative_to(ROOT).as_posix()
    file = tmp_path / "COMMIT_EDITMSG"
    for text, status in (("ops: Add an op\n\nWhy.\n", 0), ("an op\n", 1)):
        file.write_text(text)
        command = [sys.executable, commit_message.__file__, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert bool(done.stderr) == bool(status)
