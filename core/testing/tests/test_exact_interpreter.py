"""Triton's interpreter is wrong about bfloat16 and float8, and right once it is mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton")

NARROW = ("torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2")


@pytest.fixture(scope="module")
def script_results() -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("exactness.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results: dict[str, dict[str, Any]] = json.loads(process.stdout)
    return results


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize("conversion", [f"{way} {d}" for way in ("to", "from") for d in NARROW])
def test_conversions_equal_torch(
    conversion: str, script_results: dict[str, dict[str, Any]]
) -> None:
    assert script_results["after"][conversion]


@pytest.mark.process
def test_arithmetic_on_bits_raises_with_advice(script_results: dict[str, dict[str, Any]]) -> None:
    assert "add of bf16" in script_results["after"]["doubled"]
    assert ".to(tl.float32)" in script_results["after"]["doubled"]


@pytest.mark.process
def test_a_matmul_multiplies_the_numbers(script_results: dict[str, dict[str, Any]]) -> None:
    assert script_results["after"]["product"]


@pytest.mark.process
def test_the_interpreter_itself_is_still_wrong(script_results: dict[str, dict[str, Any]]) -> None:
    """Where this fails, triton has mended it, and ``exact_interpreter`` can go."""
    before = script_results["before"]
    assert not all(before[f"to {dtype}"] for dtype in NARROW)
    assert before["doubled"] != "[3.0, -4.0]"
    assert not before["product"]
