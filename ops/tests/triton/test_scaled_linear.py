"""Products of 8-bit and 4-bit numbers: every code is multiplied as what it stands for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from interposer import Capability, Request
from interposer_ops._triton.availability import INTERPRETER, judge_integers, judge_operands


@pytest.fixture(scope="module")
def script_results() -> dict[str, bool]:
    script = Path(__file__).with_name("codes.py")
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
    results: dict[str, bool] = json.loads(process.stdout)
    return results


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize(
    "product",
    [
        "float8_e4m3fn by float8_e4m3fn",
        "float8_e5m2 by float8_e4m3fn",
        "float8_e4m3fn by float8_e5m2",
        "blocks",
        "mxfp8",
        "mxfp4 float32",
        "mxfp4 bfloat16",
        "mxfp4 float16",
        "nvfp4",
        "exponents",
    ],
)
def test_every_code_is_multiplied_as_its_decoded_number(
    product: str, script_results: dict[str, bool]
) -> None:
    """NaN and infinity included, which are no part of the ops' cases."""
    assert script_results[product]


@pytest.mark.parametrize(
    ("architecture", "dtype", "accepted"),
    [
        ("sm_75", "float8_e4m3fn", True),
        ("sm_80", "float8_e4m3fn", True),
        ("sm_80", "float8_e4m3fnuz", False),
        ("sm_90a", "float8_e5m2", True),
        ("gfx942", "float8_e4m3fnuz", True),
        ("gfx942", "float8_e4m3fn", True),
        ("gfx950", "float8_e4m3fnuz", False),
        ("gfx1100", "float8_e5m2", True),
    ],
)
@pytest.mark.parametrize("operand", ["x_dtype", "weight_dtype"])
def test_operands_are_accepted_where_kernels_can_multiply_them(
    operand: str, architecture: str, dtype: str, accepted: bool
) -> None:
    capability = Capability(architecture, frozenset({"triton"}))
    request = Request("kernel", "any", "any", capability, "bfloat16", {operand: dtype})
    verdict = judge_operands(request)
    assert verdict.accepted == accepted
    assert accepted or architecture in verdict.reason


@pytest.mark.parametrize(
    ("architecture", "accepted"), [("sm_75", False), ("sm_80", True), ("gfx942", True)]
)
def test_integers_are_accepted_where_triton_multiplies_them(
    architecture: str, accepted: bool
) -> None:
    capability = Capability(architecture, frozenset({"triton"}))
    verdict = judge_integers(Request("kernel", "any", "any", capability, "bfloat16"))
    assert verdict.accepted == accepted
    assert accepted or verdict.reason == (
        "triton multiplies integers on sm_80 and newer, the device is sm_75"
    )


@pytest.mark.parametrize(("dtype", "accepted"), [("float8_e5m2", True), ("float8_e5m2fnuz", False)])
def test_formats_that_the_interpreter_lacks_are_refused(dtype: str, accepted: bool) -> None:
    capability = Capability("interpreter", frozenset({"triton", INTERPRETER}))
    request = Request("kernel", "any", "cpu", capability, "bfloat16", {"x_dtype": dtype})
    assert judge_operands(request).accepted == accepted
