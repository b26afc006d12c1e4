"""The command that lists ops, and the page that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "ops.md"


def ops(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from interposer_tools import main; main()", "ops"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)


def test_the_page_is_what_the_docstrings_say(tmp_path: Path) -> None:
    page = tmp_path / "ops.md"
    done = ops("--from", "interposer-ops", "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    assert page.read_text() == PAGE.read_text(), (
        "renew it: interposer ops --from interposer-ops --markdown docs/ops.md"
    )


def test_an_op_is_shown_with_its_definition() -> None:
    (facts,) = json.loads(ops("rms_norm", "--json").stdout)
    assert facts["provider"] == "interposer-ops"
    assert facts["schema"] == "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"
    assert "interposer-cpu/rms_norm_vector_norm" in facts["kernels"]
    assert "arXiv:1910.07467" in ops("rms_norm").stdout


def test_a_name_that_nobody_has_is_answered_with_the_nearest() -> None:
    wrong = ops("rms_nrom")
    assert wrong.returncode == 1
    assert "Unknown op 'rms_nrom'. Known, nearest first: 'rms_norm'" in wrong.stderr
    wrong = ops("--from", "interposer-opz")
    assert "Unknown distribution with ops 'interposer-opz'" in wrong.stderr
