from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from interposer import CustomOp
from interposer_ops.norms import (
    fused_add_gemma_rms_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
)
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

SHAPES = [(1, 8), (5, 127), (2, 3, 64), (0, 16)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_equals_torch(shape: tuple[int, ...], eps: float) -> None:
    x, weight = numbers(*shape), numbers(shape[-1], seed=1)
    expected = functional.rms_norm(x, shape[-1:], weight, eps)
    torch.testing.assert_close(rms_norm(x, weight, eps), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_once_to_its_dtype(dtype: torch.dtype) -> None:
    x, weight = (100 * numbers(4, 300)).to(dtype), numbers(300, seed=1).to(dtype)
    exact = functional.rms_norm(x.double(), (300,), weight.double(), 1e-6)
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    off = (result.double() - exact).abs() > 1.01 * torch.finfo(dtype).eps / 2 * exact.abs()
    assert not off.any()


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add_rms_norm_normalises_the_sum(shape: tuple[int, ...]) -> None:
    x, residual, weight = numbers(*shape), numbers(*shape, seed=1), numbers(shape[-1], seed=2)
    y, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, residual + x)
    torch.testing.assert_close(y, functional.rms_norm(residual + x, shape[-1:], weight, 1e-6))


def test_fused_add_rms_norm_normalises_the_residual_that_it_returns() -> None:
    x, residual = numbers(3, 64).bfloat16(), (100 * numbers(3, 64, seed=1)).bfloat16()
    weight = numbers(64, seed=2).bfloat16()
    y, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    assert total.dtype == torch.bfloat16
    assert torch.equal(y, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_gemma_rms_norm_scales_by_one_plus_weight(shape: tuple[int, ...], eps: float) -> None:
    x, weight = numbers(*shape), numbers(shape[-1], seed=1)
    expected = functional.rms_norm(x, shape[-1:], weight + 1, eps)
    torch.testing.assert_close(gemma_rms_norm(x, weight, eps), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rms_norm_equals_the_code_of_gemma(dtype: torch.dtype) -> None:
    gemma = pytest.importorskip(
        "transformers.models.gemma.modeling_gemma", reason="needs transformers"
    )
    norm = gemma.GemmaRMSNorm(48, eps=1e-5).to(dtype)
    x, weight = (3 * numbers(5, 48)).to(dtype), (0.1 * numbers(48, seed=1)).to(dtype)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(gemma_rms_norm(x, weight, 1e-5), norm(x).detach())


def test_one_plus_weight_is_not_rounded() -> None:
    x, weight = numbers(4, 64).bfloat16(), torch.full((64,), 0.0035).bfloat16()
    assert torch.equal(1 + weight, torch.ones(64).bfloat16())
    unit = functional.rms_norm(x.double(), (64,), None, 0.0)
    actual = gemma_rms_norm(x, weight, 0.0)
    assert torch.equal(actual, (unit * (1 + weight.double())).bfloat16())
    assert not torch.equal(actual, unit.bfloat16())


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_fused_add_gemma_rms_norm_normalises_the_residual_that_it_returns(
    stream: torch.dtype,
) -> None:
    x, residual = numbers(3, 64).bfloat16(), (100 * numbers(3, 64, seed=1)).to(stream)
    weight = (0.1 * numbers(64, seed=2)).bfloat16()
    y, total = fused_add_gemma_rms_norm(x, residual, weight, 1e-6)
    assert (y.dtype, total.dtype) == (torch.bfloat16, stream)
    assert torch.equal(total, (x + residual).to(stream))
    exact = functional.rms_norm(total.double(), (64,), weight.double() + 1, 1e-6)
    assert torch.equal(y, exact.to(torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_equals_torch(shape: tuple[int, ...], weighted: bool, biased: bool) -> None:
    x = 3 + numbers(*shape)
    weight = numbers(shape[-1], seed=1) if weighted else None
    bias = numbers(shape[-1], seed=2) if biased else None
    expected = functional.layer_norm(x, shape[-1:], weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected)


@given(
    mean=st.floats(-8, 8),
    scale=st.floats(0.25, 4),
    width=st.integers(2, 40),
    seed=st.integers(0, 1000),
)
def test_layer_norm_ignores_mean_and_scale_of_its_input(
    mean: float, scale: float, width: int, seed: int
) -> None:
    x = numbers(3, width, seed=seed)
    moved = layer_norm(scale * x + mean, None, None, 0.0)
    torch.testing.assert_close(moved, layer_norm(x, None, None, 0.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.mean(-1), torch.zeros(3).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(moved.square().mean(-1), torch.ones(3).double())


def test_layer_norm_of_equal_elements_is_the_bias() -> None:
    bias = torch.arange(4.0)
    assert torch.equal(layer_norm(torch.full((2, 4), 7.0), None, bias, 1e-5), bias.expand(2, 4))


def without_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return gemma_rms_norm(x, weight, 0.0)


def with_eps_outside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    root = x.float().square().mean(-1, keepdim=True).sqrt()
    return (x.float() / (root + eps) * (1 + weight.float())).to(x.dtype)


def with_rounded_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    unit = torch.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
    return unit * (1 + weight)


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps)


def after_rounding(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).to(x.dtype)
    return gemma_rms_norm(total, weight, eps), total.to(residual.dtype)


def unbiased(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide = x.float()
    y = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def uncentred(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    y = torch.rms_norm(x.float(), x.shape[-1:], None, eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


@pytest.mark.landing(4)
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (gemma_rms_norm, without_eps),
        (gemma_rms_norm, with_eps_outside),
        (gemma_rms_norm, with_rounded_rows),
        (gemma_rms_norm, plain),
        (fused_add_gemma_rms_norm, after_rounding),
        (layer_norm, unbiased),
        (layer_norm, uncentred),
    ],
)
def test_cases_detect_a_wrong_norm(
    op: CustomOp[..., Any], wrong: Callable[..., torch.Tensor]
) -> None:
    assert any(check_kernel(op, wrong, planned.build()) for planned in planned_cases(op, 0))
