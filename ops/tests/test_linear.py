from __future__ import annotations

import pytest
import torch

from interposer_ops.linear import embedding, linear


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_sums_products(rows: tuple[int, ...], with_bias: bool) -> None:
    x, weight = numbers(*rows, 7), numbers(4, 7, seed=1)
    bias = numbers(4, seed=2) if with_bias else None
    expected = (x.unsqueeze(-2) * weight).sum(-1)
    if bias is not None:
        expected += bias
    torch.testing.assert_close(linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_accumulates_in_float32(dtype: torch.dtype) -> None:
    """Of 4096 ones, a sum in 16 bits would stop at 256 or 2048."""
    ones = torch.ones(2, 4096, dtype=dtype)
    result = linear(ones, ones[:1], None)
    assert result.dtype == dtype
    assert result.tolist() == [[4096.0], [4096.0]]


def test_embedding_returns_rows() -> None:
    weight = numbers(6, 3)
    token_ids = torch.tensor([5, 0, 0, 2])
    assert embedding(token_ids, weight).tolist() == [weight[i].tolist() for i in token_ids]
    assert embedding(token_ids[:0], weight).shape == (0, 3)
