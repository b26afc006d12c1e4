"""The intended kernels are selected on the described GPUs, as the golden files state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")


def chosen(name: str, kind: str) -> dict[str, str]:
    """Return subject to chosen candidate of one kind in a golden file."""
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    pattern = rf"^{kind} '(\S+)' .*\n  -> (\S+) "
    return dict(re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "op", "kernel"),
    [
        ("h100-plain", "rms_norm", "rms_norm_triton"),
        ("h100-plain", "linear", "reference"),
        ("h100-fp8", "fp8_linear", "fp8_linear_scaled_mm"),
        ("rtx4090-fp8", "fp8_linear", "fp8_linear_triton"),
        ("a100-fp8", "fp8_linear", "fp8_linear_triton"),
        ("h100-int4", "w4a16_linear", "w4a16_linear_triton"),
        ("b200-mxfp4", "mxfp4_linear", "mxfp4_linear_triton"),
        ("t4-fp8", "fp8_linear", "fp8_linear_triton"),
        ("t4-plain", "paged_attention", "paged_attention_triton"),
    ],
)
def test_the_intended_kernel_is_selected(name: str, op: str, kernel: str) -> None:
    assert chosen(name, "kernel")[op] == kernel
