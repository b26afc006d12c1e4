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


# One worker writes the page.
pytestmark = pytest.mark.xdist_group("ops page")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("page") / "ops.md"
    done = ops("--from", "interposer-ops", "--markdown", str(file))
    assert done.returncode == 0, done.stderr
    return file.read_text(encoding="utf-8")


def test_the_page_has_every_op_with_schema_summary_result_and_cases(page: str) -> None:
    names = {
        facts["name"] for facts in json.loads(ops("--from", "interposer-ops", "--json").stdout)
    }
    sections = {
        section.partition("\n")[0].strip("` "): section
        for section in re.split("^### ", page, flags=re.MULTILINE)[1:]
    }
    assert names
    assert set(sections) == names
    assert page.startswith(f"# Ops\n\n{len(names)} ops are defined, with ")
    for name, section in sections.items():
        _, schema, summary, *_ = section.split("\n\n")
        assert schema.startswith(f"`{name}("), name
        assert summary.endswith("."), name
        assert "**Returns**" in section or "-> ()" in schema, name
        assert re.search(r"\d cases? in ", section), name


def test_the_page_says_what_a_docstring_says(page: str) -> None:
    assert "Scale each row of ``x`` to unit root mean square, then by ``weight``." in page
    assert "**Source** arXiv:1910.07467" in page


def test_an_op_is_shown_with_its_definition() -> None:
    (facts,) = json.loads(ops("rms_norm", "--json").stdout)
    assert facts["provider"] == "interposer-ops"
    assert facts["schema"] == "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"
    assert "interposer-ops/rms_norm_vector_norm" in facts["kernels"]
    assert "arXiv:1910.07467" in ops("rms_norm").stdout


def test_a_name_that_nobody_has_is_answered_with_the_nearest() -> None:
    wrong = ops("rms_nrom")
    assert wrong.returncode == 1
    assert "Unknown op 'rms_nrom'. Known, nearest first: 'rms_norm'" in wrong.stderr
    wrong = ops("--from", "interposer-opz")
    assert "Unknown distribution with ops 'interposer-opz'" in wrong.stderr
