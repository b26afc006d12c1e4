"""Rows, padding, capped logits and the Hadamard transform against other ways to write them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from interposer_ops.embedding import pad_rows, select_rows, unpad_rows
from interposer_ops.quantizers import hadamard_transform
from interposer_ops.sampling import logits_softcap


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@given(st.lists(st.integers(0, 6), max_size=9))
def test_rows_come_in_the_order_of_the_indices(indices: list[int]) -> None:
    x = numbers(7, 2)
    found = select_rows(x, torch.tensor(indices, dtype=torch.int64))
    assert found.tolist() == [x[index].tolist() for index in indices]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    spare=st.integers(0, 2),
    longer=st.integers(0, 2),
)
def test_padding_is_that_of_torch_and_can_be_undone(
    lengths: list[int], spare: int, longer: int
) -> None:
    x = numbers(sum(lengths) + spare, 2, 3)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    longest = max(lengths) + longer
    padded = pad_rows(x, starts, longest)
    expected = pad_sequence([*x.split([*lengths, spare])[:-1]], batch_first=True)
    assert torch.equal(padded[:, : max(lengths)], expected)
    assert not padded[:, max(lengths) :].any()
    padded[padded == 0] = torch.nan  # nothing of the padding may come back
    found = unpad_rows(padded, starts, len(x))
    assert torch.equal(found[: sum(lengths)], x[: sum(lengths)])
    assert not found[sum(lengths) :].any()


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
