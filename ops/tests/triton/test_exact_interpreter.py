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
def found() -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("exactness.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.mark.process
@pytest.mark.parametrize("conversion", [f"{way} {d}" for way in ("to", "from") for d in NARROW])
def test_conversions_are_those_of_torch(conversion: str, found: dict[str, dict[str, Any]]) -> None:
    assert found["after"][conversion]


@pytest.mark.process
def test_arithmetic_on_bits_says_what_to_do(found: dict[str, dict[str, Any]]) -> None:
    assert "add of bf16" in found["after"]["doubled"]
    assert ".to(tl.float32)" in found["after"]["doubled"]


@pytest.mark.process
def test_a_product_is_that_of_the_values(found: dict[str, dict[str, Any]]) -> None:
    assert found["after"]["product"]


@pytest.mark.process
def test_the_interpreter_itself_is_still_wrong(found: dict[str, dict[str, Any]]) -> None:
    """Where this fails, triton has mended it, and ``exact_interpreter`` can go."""
    before = found["before"]
    assert not all(before[f"to {dtype}"] for dtype in NARROW)
    assert before["doubled"] != "[3.0, -4.0]"
    assert not before["product"]
