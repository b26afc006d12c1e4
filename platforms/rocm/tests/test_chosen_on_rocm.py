"""The intended kernels are selected on the described GPUs, as the golden files state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize(
    ("name", "op", "kernel"),
    [
        ("mi300x-plain", "rms_norm", "rms_norm_triton"),
        ("mi300x-plain", "linear", "linear_split"),
        ("rx9070xt-plain", "linear", "reference"),
        ("mi250x-fp8", "fp8_linear", "fp8_linear_split"),
        ("mi300x-fp8", "fp8_linear", "fp8_linear_split"),
        ("mi355x-fp8", "fp8_linear", "fp8_linear_split"),
        ("rx7900xtx-fp8", "fp8_linear", "fp8_linear_triton"),
        ("rx9070xt-fp8", "fp8_linear", "fp8_linear_triton"),
        ("mi300x-int4", "w4a16_linear", "w4a16_linear_triton"),
        ("mi355x-mxfp4", "mxfp4_linear", "mxfp4_linear_triton"),
    ],
)
def test_the_intended_kernel_is_selected(name: str, op: str, kernel: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    chosen = re.findall(rf"^kernel '{op}' .*\n  -> (\S+) ", text, re.MULTILINE)
    assert {*chosen} == {kernel}
