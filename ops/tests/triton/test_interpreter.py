"""Every Triton kernel against its reference, by Triton's interpreter in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from interposer import Config, PlatformEntry, place
from interposer.errors import PlatformUnavailableError
from interposer.records import Kernel
from interposer_ops._records import triton_kernels
from interposer_ops.plugin import interposer_records

RECORDS = triton_kernels()
MODULES = sorted(
    {r.target.split(":")[0].partition(".")[2] for r in RECORDS if isinstance(r, Kernel)}
)


def interpreted(*arguments: str) -> str:
    """Run Python with ``TRITON_INTERPRET=1`` and return its output."""
    # The interpreter multiplies by numpy, and numpy by OpenBLAS. On some processors, the last bits
    # of a float32 row depend on its position in the matrix, except in the oldest kernels.
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Prescott"}
    environment = {**os.environ, "TRITON_INTERPRET": "1", **settings}
    command = [sys.executable, "-W", "error::RuntimeWarning", *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=3000, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def kernels_of(modules: Sequence[str]) -> set[str]:
    prefixes = tuple(f"interposer_ops.{module}:" for module in modules)
    return {r.name for r in RECORDS if isinstance(r, Kernel) and r.target.startswith(prefixes)}


def check(modules: Sequence[str], *arguments: str) -> None:
    """Run the cases of modules' kernels in a process; assert that each kernel is correct."""
    script = str(Path(__file__).with_name("interpret.py"))
    results = json.loads(interpreted(script, *modules, *arguments))
    assert results, "no kernel stands in these modules"
    assert set(results) == kernels_of(modules), "no op that they could be kernels of is declared"
    assert {name: result["faults"] for name, result in results.items() if result["faults"]} == {}
    idle = {name: result["refusals"] for name, result in results.items() if not result["run"]}
    assert idle == {}


# A process spends six seconds on importing torch, what it traces with, and triton.
@pytest.mark.process
def test_kernels_equal_the_references_of_their_ops() -> None:
    check(MODULES, "--first")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_pass_all_quick_cases_and_keep_their_promises(module: str) -> None:
    check([module], "--seed", "1", "--promises")


@pytest.mark.slow
@pytest.mark.process
def test_kernels_draw_the_noise_of_the_ops() -> None:
    """Bit for bit where it is uniform; its two logarithms are off by a few roundings."""
    results = json.loads(interpreted(str(Path(__file__).with_name("drawn_noise.py"))))
    assert results["uniform"] is True
    assert results["gumbel error"] < 8 * 2**-24


def test_the_interpreter_must_be_named_and_enabled() -> None:
    (entry,) = (record for record in interposer_records() if isinstance(record, PlatformEntry))
    assert entry.explicit
    refusals = {refusal.candidate: refusal.reason for refusal in place().choice.refusals}
    assert "used only if you name it" in refusals["interpreter"]
    with pytest.raises(PlatformUnavailableError, match="set TRITON_INTERPRET=1 before Python"):
        place(Config(platform="interpreter"))


ASKED = """
import interposer
found = interposer.place(interposer.Config(platform="interpreter"))
print(found.device.capability.architecture, found.platform.memory("cpu").total_bytes > 0)
print(interposer.place().platform.name)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_named_interpreter_is_selected() -> None:
    assert interpreted("-c", ASKED).split() == ["interpreter", "True", "cpu"]
