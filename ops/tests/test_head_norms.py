from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from interposer import CustomOp
from interposer_ops.norms import l2_norm, qk_norm
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

Pair = tuple[torch.Tensor, torch.Tensor]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_qk_norm_normalises_every_head(heads: int, kv_heads: int, num_tokens: int) -> None:
    query, key = numbers(num_tokens, heads, 24), numbers(num_tokens, kv_heads, 24, seed=1)
    weights = numbers(24, seed=2), numbers(24, seed=3)
    actual = qk_norm(query, key, *weights, 1e-6)
    for result, x, weight in zip(actual, (query, key), weights, strict=True):
        torch.testing.assert_close(result, functional.rms_norm(x, (24,), weight, 1e-6))


def test_qk_norm_keeps_its_inputs_and_returns_dense_heads() -> None:
    projected = numbers(3, 8, 16)
    before = projected.clone()
    actual = qk_norm(projected[:, :4], projected[:, 4:6], torch.ones(16), torch.ones(16), 1e-6)
    assert torch.equal(projected, before)
    assert all(result.is_contiguous() for result in actual)


def test_l2_norm_equals_that_of_linear_attention() -> None:
    module = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers"
    )
    x = numbers(3, 4, 32)
    torch.testing.assert_close(l2_norm(x, 1e-6), module.l2norm(x, eps=1e-6))


@given(width=st.integers(1, 50), seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_l2_norm_divides_by_the_length_with_eps(width: int, seed: int, scale: float) -> None:
    x, eps = scale * numbers(4, width, seed=seed), 0.1
    squares = x.square().sum(-1)
    length = l2_norm(x, eps).square().sum(-1)
    torch.testing.assert_close(length, squares / (squares + eps))


def test_l2_norm_of_zeros_is_zero() -> None:
    assert torch.equal(l2_norm(torch.zeros(2, 4), 1e-6), torch.zeros(2, 4))


def exchanged_weights(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Pair:
    query_weight, key_weight, eps = rest
    return qk_norm(query, key, key_weight, query_weight, eps)


def over_all_heads(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Pair:
    *weights, eps = rest
    actual = []
    for x, weight in zip((query, key), weights, strict=True):
        wide = x.float()
        scale = (wide.square().mean((-2, -1), keepdim=True) + eps).rsqrt()
        actual.append((wide * scale * weight).to(x.dtype).contiguous())
    return actual[0], actual[1]


def by_the_mean(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def clamped_length(x: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.normalize(x.float(), dim=-1, eps=eps).to(x.dtype)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (qk_norm, exchanged_weights),
        (qk_norm, over_all_heads),
        (l2_norm, by_the_mean),
        (l2_norm, clamped_length),
    ],
)
def test_cases_detect_a_wrong_norm(op: CustomOp[..., Any], wrong: Callable[..., Any]) -> None:
    assert any(check_kernel(op, wrong, planned.build()) for planned in planned_cases(op, 0))
