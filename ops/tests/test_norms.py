from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from interposer_ops.norms import fused_add_rms_norm, rms_norm

SHAPES = [(1, 8), (5, 127), (2, 3, 64), (0, 16)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_is_that_of_torch(shape: tuple[int, ...], eps: float) -> None:
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
