"""Capped logits and the Hadamard transform against other ways to write them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.quantizers import hadamard_transform
from interposer_ops.sampling import logits_softcap


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_capped_logits_keep_their_order_and_their_limit() -> None:
    logits = torch.tensor([[-1e9, -50.0, -0.01, 0.0, 0.01, 50.0, 1e9]], dtype=torch.float64)
    found = logits_softcap(logits, 30.0)[0].tolist()
    assert found == sorted(found)
    assert found[0] == -30.0
    assert found[-1] == 30.0
    assert found[5] == pytest.approx(30 * math.tanh(50 / 30))
    assert found[4] == pytest.approx(0.01)


def sylvester(width: int) -> torch.Tensor:
    """Return the Hadamard matrix as a Kronecker product of those of size 2."""
    matrix, smallest = (
        torch.ones(1, 1, dtype=torch.float64),
        torch.tensor([[1.0, 1.0], [1.0, -1.0]]),
    )
    while len(matrix) < width:
        matrix = torch.kron(smallest.double(), matrix)
    return matrix


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_the_transform_is_a_product_with_sylvesters_matrix(width: int) -> None:
    x = numbers(2, 3, width)
    found = hadamard_transform(x, 0.5)
    torch.testing.assert_close(found, 0.5 * x @ sylvester(width))


@given(st.sampled_from([1, 4, 32]), st.integers(0, 50))
def test_the_transform_keeps_lengths_and_undoes_itself(width: int, seed: int) -> None:
    x = numbers(3, width, seed=seed)
    found = hadamard_transform(x, width**-0.5)
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(hadamard_transform(found, width**-0.5), x)
