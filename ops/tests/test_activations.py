from __future__ import annotations

import math

import pytest
import torch

from interposer_ops.activations import gelu_and_mul, silu_and_mul


def silu(g: float) -> float:
    return g / (1 + math.exp(-g))


def gelu(g: float) -> float:
    return g * (1 + math.erf(g / math.sqrt(2))) / 2


def gelu_tanh(g: float) -> float:
    return g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2


@pytest.mark.parametrize("shape", [(1, 2), (4, 14), (2, 3, 8), (0, 8)])
def test_the_first_half_gates_the_second(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    half = shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    for result, activation in (
        (silu_and_mul(x), silu),
        (gelu_and_mul(x, "none"), gelu),
        (gelu_and_mul(x, "tanh"), gelu_tanh),
    ):
        expected = torch.tensor([activation(g) for g in gate.flatten().tolist()])
        expected = expected.double().view(gate.shape) * up
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_far_gates_neither_overflow_nor_pass() -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert silu_and_mul(x).tolist() == [[0.0, 3e4]]
    assert gelu_and_mul(x, "none").tolist() == [[0.0, 3e4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_rounded_once(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert torch.equal(silu_and_mul(x), silu_and_mul(x.float()).to(dtype))
    assert torch.equal(gelu_and_mul(x, "tanh"), gelu_and_mul(x.float(), "tanh").to(dtype))
