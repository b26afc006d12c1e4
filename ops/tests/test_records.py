"""The records in the file equal the declarations next to the code."""

from __future__ import annotations

import pytest
from tests.forks import forks

from interposer_ops._records import RECORDS, read_records, records_text

DECLARED = """
from interposer_ops._declare import declared_records
from interposer_ops._records import records_text
print(records_text(declared_records()), end="")
"""


@pytest.mark.process
def test_written_records_equal_the_declared_records() -> None:
    """Declare in a separate process, which imports no other plugin."""
    pytest.importorskip("triton", reason="needs the package triton")
    process = forks().run("-c", DECLARED, check=True)
    mend = "python -m interposer_ops._declare"
    assert process.stdout == RECORDS.read_text(encoding="utf-8"), f"write them again: {mend}"


def test_records_survive_writing_and_reading() -> None:
    assert records_text(read_records()) == RECORDS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "kernel", ["w4a16_linear_triton", "w8a16_linear_triton", "w4a8_linear_triton", "linear_split"]
)
def test_split_k_kernels_do_not_promise_batch_invariance(kernel: str) -> None:
    """The number of parts of a sum depends on the number of tokens."""
    (properties,) = (record.properties for record in read_records() if record.name == kernel)
    assert "batch_invariant" not in properties
