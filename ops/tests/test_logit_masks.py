"""Masks over logits against loops over tokens, and log probabilities against torch."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.sampling import (
    apply_logit_bias,
    apply_temperature,
    apply_token_bitmask,
    mask_min_p,
    mask_top_k_top_p,
    suppress_tokens_until,
    token_logprobs,
)

SIZES = st.tuples(st.integers(0, 4), st.sampled_from([1, 31, 32, 33, 70]))
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, sizes: tuple[int, int]) -> torch.Tensor:
    return 3 * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def listed(seed: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Return up to five distinct tokens for each row, filled up with -1."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocab_size = sizes
    ids = torch.full((rows, 5), -1)
    for row in range(rows):
        count = int(torch.randint(min(5, vocab_size) + 1, (), generator=generator))
        ids[row, :count] = torch.randperm(vocab_size, generator=generator)[:count]
    return ids


@given(SIZES, SEEDS)
def test_listed_tokens_are_biased(sizes: tuple[int, int], seed: int) -> None:
    logits, ids = drawn(seed, sizes), listed(seed, sizes)
    values = drawn(seed + 1, (sizes[0], 5))
    values[:, :1] = -math.inf
    expected = logits.clone()
    for row in range(sizes[0]):
        for token, value in zip(ids[row].tolist(), values[row].tolist(), strict=True):
            if token >= 0:
                expected[row, token] += value
    torch.testing.assert_close(apply_logit_bias(logits, ids, values), expected)


@given(SIZES, SEEDS)
def test_tokens_without_a_bit_are_masked(sizes: tuple[int, int], seed: int) -> None:
    logits = drawn(seed, sizes)
    words = -(-sizes[1] // 32)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(-(2**31), 2**31, (sizes[0], words), generator=generator)
    result = apply_token_bitmask(logits, mask.to(torch.int32))
    for row, column in torch.cartesian_prod(*map(torch.arange, sizes)).tolist():
        # Python's shift of a negative number fills up with its sign, as two's complement does.
        allowed = int(mask[row, column // 32]) >> column % 32 & 1
        assert result[row, column] == (logits[row, column] if allowed else -math.inf)


@given(SIZES, SEEDS)
def test_stop_tokens_are_masked_until_the_minimum_number(sizes: tuple[int, int], seed: int) -> None:
    logits, stops = drawn(seed, sizes), listed(seed, sizes)
    generator = torch.Generator().manual_seed(seed)
    steps, min_tokens = torch.randint(4, (2, sizes[0]), generator=generator)
    expected = logits.clone()
    for row in range(sizes[0]):
        for token in stops[row].tolist():
            if token >= 0 and steps[row] < min_tokens[row]:
                expected[row, token] = -math.inf
    assert torch.equal(suppress_tokens_until(logits, steps, min_tokens, stops), expected)


def test_temperature_zero_keeps_a_row_unchanged() -> None:
    logits = torch.tensor([[1.0, -2.0], [1.0, -2.0], [1.0, -2.0]])
    result = apply_temperature(logits.to(torch.bfloat16), torch.tensor([0.0, 0.5, 4.0]))
    assert result.dtype == torch.float32
    assert result.tolist() == [[1.0, -2.0], [2.0, -4.0], [0.25, -0.5]]


@given(SIZES.filter(lambda sizes: sizes[0] > 0), SEEDS, st.floats(0.05, 0.95))
def test_top_p_keeps_the_nucleus(sizes: tuple[int, int], seed: int, top_p: float) -> None:
    """The fewest of the likeliest tokens that weigh ``top_p`` together, and no other."""
    logits = drawn(seed, sizes)
    result = mask_top_k_top_p(logits, None, torch.full((sizes[0],), top_p))
    for row, is_kept in zip(logits.double().softmax(-1), result > -math.inf, strict=True):
        likeliest = row.sort(descending=True).values
        count = int(is_kept.sum())
        assert torch.equal(row[is_kept].sort(descending=True).values, likeliest[:count])
        assert likeliest[: count - 1].sum() < top_p + 1e-5
        assert likeliest[:count].sum() > top_p - 1e-5


@given(SIZES.filter(lambda sizes: sizes[0] > 0), SEEDS, st.integers(0, 80))
def test_top_k_keeps_the_largest_logits(sizes: tuple[int, int], seed: int, top_k: int) -> None:
    logits = drawn(seed, sizes)
    result = mask_top_k_top_p(logits, torch.full((sizes[0],), top_k), None)
    count = min(top_k or sizes[1], sizes[1])
    expected = torch.full_like(logits, -math.inf)
    values, ids = logits.topk(count, -1)
    assert torch.equal(result, expected.scatter(-1, ids, values))


@given(SIZES.filter(lambda sizes: sizes[0] > 0), SEEDS, st.floats(0.01, 0.9))
def test_min_p_masks_unlikely_tokens(sizes: tuple[int, int], seed: int, min_p: float) -> None:
    logits = drawn(seed, sizes)
    ratio = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    is_kept = mask_min_p(logits, torch.full((sizes[0],), min_p)) > -math.inf
    assert is_kept[ratio > min_p + 1e-5].all()
    assert not is_kept[ratio < min_p - 1e-5].any()


@given(SIZES, SEEDS, st.booleans())
def test_logprobs_ranks_and_the_likeliest(sizes: tuple[int, int], seed: int, ties: bool) -> None:
    logits = drawn(seed, sizes)
    logits = logits.round() if ties else logits
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes[1], (sizes[0],), generator=generator)
    num_top = min(3, sizes[1])
    logprobs, ranks, top, ids = token_logprobs(logits, tokens, num_top)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    for row in range(sizes[0]):
        values = logits[row].tolist()
        order = sorted(range(sizes[1]), key=lambda token: (-values[token], token))
        assert ids[row].tolist() == order[:num_top]
        assert ranks[row] == 1 + sum(value > values[tokens[row]] for value in values)
    torch.testing.assert_close(top.double(), expected.gather(1, ids), rtol=1e-5, atol=1e-5)
