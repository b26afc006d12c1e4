"""Permutation of tokens against loops over experts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.experts import moe_permute, moe_unpermute


@st.composite
def choices(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draw the experts of a few tokens, -1 among them, and how many experts there are."""
    num_tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 6))
    row = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    rows = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    return torch.tensor(rows, dtype=torch.int64).view(num_tokens, top_k), num_experts


def slots_of(ids: torch.Tensor, num_experts: int) -> list[list[int]]:
    """Return the slots of each expert in ascending order."""
    flat = ids.flatten().tolist()
    return [[slot for slot, expert in enumerate(flat) if expert == e] for e in range(num_experts)]


@given(choices(), st.integers(0, 2**31))
def test_permuted_rows_are_sorted_by_expert_and_unpermuted(
    choice: tuple[torch.Tensor, int], seed: int
) -> None:
    ids, num_experts = choice
    num_tokens, top_k = ids.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 5, generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    rows, positions, starts = moe_permute(x, ids, num_experts)
    groups = slots_of(ids, num_experts)
    order = [slot for group in groups for slot in group]
    assert torch.equal(rows[: len(order)], x[[slot // top_k for slot in order]])
    assert not rows[len(order) :].any()
    assert starts.tolist() == [sum(map(len, groups[:e])) for e in range(num_experts + 1)]
    place = {slot: at for at, slot in enumerate(order)}
    assert positions.flatten().tolist() == [place.get(slot, -1) for slot in range(ids.numel())]
    local_weights = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(moe_unpermute(rows, positions, weights), x * local_weights)
