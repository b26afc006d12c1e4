"""The records of the plugin are those that are declared beside the code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from interposer_ops._records import RECORDS, read_records, records_text

DECLARED = """
from interposer_ops._declare import declared_records
from interposer_ops._records import records_text
print(records_text(declared_records()), end="")
"""


@pytest.mark.process
def test_written_records_equal_the_declared_records() -> None:
    """In a process of its own, in which nothing but ops is declared."""
    pytest.importorskip("triton", reason="needs the package triton")
    done = subprocess.run(
        [sys.executable, "-c", DECLARED], capture_output=True, text=True, timeout=300, check=True
    )
    mend = "python -m interposer_ops._declare"
    assert done.stdout == RECORDS.read_text(encoding="utf-8"), f"write them again: {mend}"


def test_records_survive_writing_and_reading() -> None:
    assert records_text(read_records()) == RECORDS.read_text(encoding="utf-8")
