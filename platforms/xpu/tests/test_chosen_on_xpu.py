"""The intended kernels are selected on the described GPUs, as the golden files state."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")
DEVICES = ("arc140v", "b580", "max1550")


@pytest.mark.parametrize(
    ("kind", "op", "kernel", "refused"),
    [
        ("plain", "rms_norm", "rms_norm_triton", ""),
        ("plain", "linear", "reference", ""),
        ("fp8", "fp8_linear", "fp8_linear_triton", "fp8_linear_fp8_gemm"),
        ("int4", "w4a16_linear", "w4a16_linear_triton", "w4a16_linear_int4_gemm"),
        ("mxfp4", "mxfp4_linear", "mxfp4_linear_triton", ""),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_intended_kernel_is_selected(
    device: str, kind: str, op: str, kernel: str, refused: str
) -> None:
    text = (GOLDEN / f"{device}-{kind}.txt").read_text()
    subjects = [part for part in text.split("\n\n") if part.startswith(f"kernel {op!r} ")]
    assert subjects
    for subject in subjects:
        assert f"-> {kernel} (interposer-ops" in subject
        assert not refused or f"not {refused} (interposer-xpu" in subject
