"""Adapters of every row against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.lora import lora_expand, lora_shrink


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@given(
    adapters=st.lists(st.integers(-1, 2), max_size=8),
    rank=st.integers(1, 4),
    before=st.integers(0, 3),
    seed=st.integers(0, 50),
)
def test_each_row_is_projected_by_its_adapter(
    adapters: list[int], rank: int, before: int, seed: int
) -> None:
    count = len(adapters)
    x, y = numbers(count, 5, seed=seed), numbers(count, before + 6, seed=seed + 1)
    lora_a, lora_b = numbers(3, rank, 5, seed=seed + 2), numbers(3, 4, rank, seed=seed + 3)
    expected = y.clone()
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            delta = lora_b[adapter] @ (lora_a[adapter] @ x[row])
            expected[row, before : before + 4] += 0.5 * delta
    adapter_ids = torch.tensor(adapters, dtype=torch.int64)
    shrunk = lora_shrink(x, lora_a, adapter_ids, 0.5)
    assert (shrunk[adapter_ids < 0] == 0).all()
    lora_expand(shrunk, lora_b, adapter_ids, y, before)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shrunk_activations_are_float32(dtype: torch.dtype) -> None:
    """1 + 1/4096 is rounded to 1 by both dtypes."""
    x = torch.tensor([[1.0, 2.0**-12]], dtype=dtype)
    shrunk = lora_shrink(x, torch.ones(1, 1, 2, dtype=dtype), torch.tensor([0]), 1.0)
    assert shrunk.dtype == torch.float32
    assert shrunk.item() == 1 + 2.0**-12
    y = torch.tensor([[-1.0]], dtype=dtype)
    lora_expand(shrunk, torch.ones(1, 1, 1, dtype=dtype), torch.tensor([0]), y, 0)
    assert y.item() == 2.0**-12


def test_a_row_without_an_adapter_keeps_its_bits() -> None:
    y = torch.tensor([[-0.0, torch.inf]])
    shrunk = torch.tensor([[torch.nan]])
    lora_expand(shrunk, torch.ones(1, 2, 1), torch.tensor([-1]), y, 0)
    assert y.tolist() == [[0.0, torch.inf]]
    assert y.signbit().tolist() == [[True, False]]
