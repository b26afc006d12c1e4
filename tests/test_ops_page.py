"""The command that lists ops, and the page that it writes for the site of the documentation."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.forks import forks


def ops(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forks().run("-m", "interposer_tools", "ops", *arguments)


pytestmark = pytest.mark.process


@pytest.mark.slow
def test_the_page_has_every_op_with_schema_summary_result_and_cases(tmp_path: Path) -> None:
    file = tmp_path / "ops.md"
    done = ops("--from", "interposer-ops", "--markdown", str(file))
    assert done.returncode == 0, done.stderr
    page = file.read_text(encoding="utf-8")
    names = {
        facts["name"] for facts in json.loads(ops("--from", "interposer-ops", "--json").stdout)
    }
    sections = {
        section.partition("\n")[0].strip("` "): section
        for section in re.split("^### ", page, flags=re.MULTILINE)[1:]
    }
    assert names
    assert set(sections) == names
    assert page.startswith(f"# Ops\n\nYou can write kernels for these {len(names)} ops. ")
    for name, section in sections.items():
        _, schema, summary, *_ = section.split("\n\n")
        assert schema.startswith(f"`{name}("), name
        assert summary.endswith("."), name
        assert "**Returns**" in section or "-> ()" in schema, name
        assert re.search(r"\d cases? in ", section), name


def test_an_op_is_shown_with_its_definition() -> None:
    (facts,) = json.loads(ops("rms_norm", "--json").stdout)
    assert facts["provider"] == "interposer-ops"
    assert facts["schema"] == "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"
    assert "interposer-ops/rms_norm_vector_norm" in facts["kernels"]
    assert "arXiv:1910.07467" in ops("rms_norm").stdout


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    wrong = ops("rms_nrom")
    assert wrong.returncode == 2
    assert "Unknown op 'rms_nrom'. Known, nearest first: 'rms_norm'" in wrong.stderr
    wrong = ops("--from", "interposer-opz")
    assert "Unknown distribution with ops 'interposer-opz'" in wrong.stderr
