from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.embedding import embedding
from interposer_ops.linear import batched_linear, grouped_linear, linear


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


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_each_row_is_multiplied_by_the_weight_of_its_group(
    counts: list[int], spare: int, seed: int
) -> None:
    x = numbers(sum(counts) + spare, 3, seed=seed)
    weight = numbers(len(counts), 4, 3, seed=seed + 1)
    starts = torch.tensor([0, *counts]).cumsum(0)
    parts = [
        part @ matrix.T for part, matrix in zip(x.split([*counts, spare]), weight, strict=False)
    ]
    expected = torch.cat((*parts, torch.zeros(spare, 4, dtype=x.dtype)))
    torch.testing.assert_close(grouped_linear(x, weight, starts), expected)


def test_a_nan_row_does_not_affect_other_rows() -> None:
    x = numbers(3, 2)
    x[1] = torch.nan
    actual = grouped_linear(x, numbers(2, 4, 2), torch.tensor([0, 2, 3]))
    assert actual.isnan().any(-1).tolist() == [False, True, False]


def test_each_head_is_multiplied_by_its_matrix() -> None:
    x, weight = numbers(4, 3, 5), numbers(3, 5, 2, seed=1)
    actual = batched_linear(x.transpose(0, 1), weight)
    torch.testing.assert_close(actual, torch.einsum("tni,nio->nto", x, weight))
    assert actual.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_weights_accumulate_in_float32(dtype: torch.dtype) -> None:
    ones = torch.ones(1, 4096, dtype=dtype)
    assert batched_linear(ones[None], ones.T[None]).item() == 4096.0
    assert grouped_linear(ones, ones[None], torch.tensor([0, 1])).item() == 4096.0
