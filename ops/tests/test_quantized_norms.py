from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from interposer_ops.norms import rms_norm_quantize_fp8
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("out_dtype", FORMATS, ids=str)
def test_a_result_is_the_nearest_number_of_its_format(out_dtype: torch.dtype) -> None:
    x, weight, scale = numbers(4, 96), 1 + numbers(96, seed=1) / 10, torch.tensor([0.01])
    actual = rms_norm_quantize_fp8(x, weight, scale, 1e-5, out_dtype)
    assert actual.dtype == out_dtype
    every = torch.arange(256, dtype=torch.uint8).view(out_dtype).double()
    every = every[every.isfinite()].unique()
    exact = functional.rms_norm(x.double(), (96,), weight.double(), 1e-5) / 0.01
    distance = (exact[..., None] - every).abs().min(-1).values
    torch.testing.assert_close((actual.double() - exact).abs(), distance, rtol=0, atol=1e-3)


@pytest.mark.parametrize("out_dtype", FORMATS, ids=str)
def test_numbers_beyond_the_format_saturate(out_dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -4.0]])
    actual = rms_norm_quantize_fp8(x, torch.ones(2), torch.tensor([1e-9]), 0.0, out_dtype)
    largest = torch.finfo(out_dtype).max
    assert actual.double().tolist() == [[largest, -largest]]


def test_the_row_is_not_rounded_before_it_is_quantized() -> None:
    x, weight = torch.tensor([[1.0, 1.03125]]).bfloat16(), torch.ones(2).bfloat16()
    unit = functional.rms_norm(x.double(), (2,), None, 0.0)[0, 0]
    halfway = 1.0625  # between 1 and 1.125
    scale = (unit * (1 - 5e-5) / halfway).float()
    assert float(unit.bfloat16() / scale) < halfway < float(unit / scale)
    actual = rms_norm_quantize_fp8(x, weight, scale[None], 0.0, torch.float8_e4m3fn)
    assert actual.double()[0, 0] == 1.125


def kernel(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the op by other steps: another order of the sum, a reciprocal, a root, a division."""
    eps, out_dtype = rest
    wide = x.float()
    total = wide.flip(-1).square().cumsum(-1)[..., -1:]
    y = (wide * weight) * (scale.reciprocal() / torch.sqrt(total / x.shape[-1] + eps))
    largest = torch.finfo(out_dtype).max
    return y.clamp(-largest, largest).to(out_dtype)


@pytest.mark.slow
def test_cases_avoid_results_near_rounding_boundaries() -> None:
    for planned in planned_cases(rms_norm_quantize_fp8, 1):
        assert planned.point is not None
        if planned.point.layout == "dense" and "no rows" not in planned.label:
            assert check_kernel(rms_norm_quantize_fp8, kernel, planned.build()) == []


def unclamped(x: torch.Tensor, weight: torch.Tensor, scale: Any, *rest: Any) -> torch.Tensor:
    eps, out_dtype = rest
    y: torch.Tensor = torch.rms_norm(x.float(), weight.shape, weight.float(), eps) / scale
    return y.to(out_dtype)


def slightly_off(x: torch.Tensor, weight: torch.Tensor, scale: Any, *rest: Any) -> torch.Tensor:
    eps, out_dtype = rest
    return rms_norm_quantize_fp8(x, weight, scale * 1.05, eps, out_dtype)


def multiplied(x: torch.Tensor, weight: torch.Tensor, scale: Any, *rest: Any) -> torch.Tensor:
    eps, out_dtype = rest
    return rms_norm_quantize_fp8(x, weight, 1 / scale, eps, out_dtype)


def flushed(x: torch.Tensor, weight: torch.Tensor, scale: Any, *rest: Any) -> torch.Tensor:
    eps, out_dtype = rest
    actual = rms_norm_quantize_fp8(x, weight, scale, eps, out_dtype).float()
    return actual.where(actual.abs() >= torch.finfo(out_dtype).tiny, 0.0).to(out_dtype)


@pytest.mark.parametrize("wrong", [unclamped, slightly_off, multiplied, flushed])
def test_cases_detect_a_wrong_norm(wrong: Any) -> None:
    planned = planned_cases(rms_norm_quantize_fp8, 0)
    assert any(check_kernel(rms_norm_quantize_fp8, wrong, plan.build()) for plan in planned)
