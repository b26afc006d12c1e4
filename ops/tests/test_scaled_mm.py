"""torch's operator for 8-bit floats also runs on a CPU, where nobody would choose it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from interposer import Capability, Request
from interposer_ops.quantized_linear import _scaled_mm as scaled_mm
from interposer_ops.quantized_linear import fp8_linear
from interposer_testing import check_kernel

WANTED: dict[str, Any] = {
    "in_features": 64,
    "out_features": 48,
    "x_dtype": "float8_e4m3fn",
    "weight_dtype": "float8_e4m3fn",
    "x_scales": "token",
    "weight_scales": "channel",
}


def request(architecture: str = "sm_90", dtype: str = "bfloat16", **changes: Any) -> Request:
    dims = {**WANTED, **changes}
    return Request("kernel", "fp8_linear", "elsewhere", Capability(architecture), dtype, dims)


@pytest.mark.landing(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accepted_cases_equal_the_reference(dtype: torch.dtype) -> None:
    ran = set()
    for case in fp8_linear.cases(dtype, 0):
        case_request = replace(request(dtype=str(dtype).removeprefix("torch.")), dims=case.dims)
        if scaled_mm.judge(case_request):
            assert check_kernel(fp8_linear, scaled_mm.fp8_linear_scaled_mm, case) == [], case.label
            ran.add((case.dims["x_scales"], case.dims["weight_scales"]))
    single = {("tensor", "tensor")}
    rows = {("token", "channel"), ("token", "tensor"), ("tensor", "channel")}
    assert ran == (single | rows if dtype == torch.bfloat16 else single)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request("x86_64"), "is for sm_89 and newer, found x86_64"),
        (request("gfx942"), "is for sm_89 and newer, found gfx942"),
        (request("sm_80"), "needs sm_89 or newer, found sm_80"),
        (request(in_features=72), "in_features is 72, must be a multiple of 16"),
        (request(out_features=40), "out_features is 40, must be a multiple of 16"),
        (request(weight_dtype="float8_e5m2"), "does not multiply float8_e4m3fn by float8_e5m2"),
        (request(dtype="float16"), "scales of rows need results of bfloat16, got float16"),
    ],
)
def test_unsupported_requests_are_refused_with_a_reason(asked: Request, reason: str) -> None:
    assert scaled_mm.judge(asked).reason == reason


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100", "sm_120"])
def test_devices_that_multiply_8_bit_floats_are_accepted(architecture: str) -> None:
    assert scaled_mm.judge(request(architecture))
    assert scaled_mm.judge(
        request(architecture, "float32", x_scales="tensor", weight_scales="tensor")
    )
