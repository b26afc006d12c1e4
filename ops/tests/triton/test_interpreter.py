"""Every Triton kernel against its reference, by Triton's interpreter in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from interposer import Config, PlatformEntry, place
from interposer.errors import PlatformUnavailableError
from interposer.records import Kernel
from interposer_ops.triton_records import triton_records

RECORDS = triton_records()
KERNELS = [record.name for record in RECORDS if isinstance(record, Kernel)]


def interpreted(*arguments: str) -> str:
    """Return what Python prints with triton told to interpret, before it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(interpreted(str(Path(__file__).with_name("interpret.py"))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_what_its_op_defines(kernel: str, results: dict[str, Any]) -> None:
    assert kernel in results, "no op that it could be a kernel of is declared"
    assert results[kernel]["faults"] == []
    assert results[kernel]["run"] > 0, results[kernel]["refusals"]


def test_the_interpreter_has_to_be_named_and_switched_on() -> None:
    (entry,) = (record for record in RECORDS if isinstance(record, PlatformEntry))
    assert entry.explicit
    refusals = {refusal.candidate: refusal.reason for refusal in place().choice.refusals}
    assert "taken only where it is named" in refusals["interpreter"]
    with pytest.raises(PlatformUnavailableError, match="set TRITON_INTERPRET=1 before Python"):
        place(Config(platform="interpreter"))


ASKED = """
import interposer
found = interposer.place(interposer.Config(platform="interpreter"))
print(found.device.capability.architecture, found.platform.memory("cpu").total_bytes > 0)
print(interposer.place().platform.name)
"""


def test_the_interpreter_is_taken_where_it_is_named() -> None:
    assert interpreted("-c", ASKED).split() == ["interpreter", "True", "cpu"]
