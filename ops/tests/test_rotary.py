from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_to_neighbours

from interposer_ops.rotary import (
    rotary_embedding,
    rotary_embedding_interleaved,
    rotary_table,
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotated_as_complex(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation by an angle is multiplication by a complex number of modulus 1."""
    half = cos.shape[-1]
    numbers = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = numbers * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_size", "rotary_size"),
    [(5, 4, 4, 8, 8), (3, 6, 2, 10, 4), (1, 3, 1, 2, 2), (0, 4, 2, 8, 8)],
)
def test_rotation_is_complex_multiplication(
    tokens: int, heads: int, kv_heads: int, head_size: int, rotary_size: int
) -> None:
    query, key = numbers(tokens, heads, head_size), numbers(tokens, kv_heads, head_size, seed=1)
    angles = numbers(tokens, rotary_size // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    actual = rotary_embedding(query, key, cos, sin)
    for result, x in zip(actual, (query, key), strict=True):
        torch.testing.assert_close(result, rotated_as_complex(x, cos, sin))


@given(position=st.integers(0, 200), distance=st.integers(0, 55), seed=st.integers(0, 100))
def test_scores_depend_on_the_distance_only(position: int, distance: int, seed: int) -> None:
    cos, sin = (table.double() for table in rotary_table(256, 16, 10000.0))
    query, key = numbers(1, 1, 16, seed=seed), numbers(1, 1, 16, seed=seed + 1)

    def score(query_position: int, key_position: int) -> float:
        at, to = slice(query_position, query_position + 1), slice(key_position, key_position + 1)
        rotated_query, _ = rotary_embedding(query, query, cos[at], sin[at])
        _, rotated_key = rotary_embedding(key, key, cos[to], sin[to])
        return float((rotated_query * rotated_key).sum())

    shifted_score = score(position + distance, position)
    assert math.isclose(shifted_score, score(distance, 0), rel_tol=1e-4, abs_tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_contiguous_and_of_their_own_dtype(dtype: torch.dtype) -> None:
    fused = numbers(4, 8, 16).to(dtype)
    cos, sin = (table[:4] for table in rotary_table(8, 8, 10000.0))
    for result in rotary_embedding(fused[:, :4], fused[:, 4:6], cos, sin):
        assert result.dtype == dtype
        assert result.is_contiguous()


def cut(whole: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return whole[:, :heads], whole[:, heads:]


@pytest.mark.parametrize("rotary_size", [2, 6, 8])
def test_interleaved_rotation_equals_gpt_j(rotary_size: int) -> None:
    query, key = cut(numbers(5, 6, 8), 4)
    angles = numbers(5, rotary_size // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    actual = rotary_embedding_interleaved(query, key, cos, sin)
    for result, x in zip(actual, (query, key), strict=True):
        turned = apply_to_neighbours(x[None, ..., :rotary_size], sin[None], cos[None])
        expected = torch.cat((turned[0], x[..., rotary_size:]), dim=-1)
        torch.testing.assert_close(result, expected)


def test_the_two_layouts_are_permutations_of_each_other() -> None:
    query, key = cut(numbers(3, 3, 8), 2)
    angles = numbers(3, 4, seed=2)
    cos, sin = angles.cos(), angles.sin()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # the halves, one element of each in turn
    paired = rotary_embedding_interleaved(query[..., order], key[..., order], cos, sin)
    halved = rotary_embedding(query, key, cos, sin)
    for one, other in zip(paired, halved, strict=True):
        torch.testing.assert_close(one, other[..., order])
