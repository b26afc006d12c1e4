"""Recurrent ops against formulas in other words, and chunks of sequences against the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch.nn import functional

from interposer import CustomOp
from interposer_ops.recurrence import causal_convolution, gated_delta_rule, state_space_scan

few = settings(max_examples=num_examples(40))
Drawn = tuple[dict[str, Any], dict[str, Any], torch.Tensor]
"""Per-token arguments, other arguments, and unused states of NaN ``[R, ...]``."""


def numbers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def convolution(tokens: int, seed: int) -> Drawn:
    token_arguments = {"x": numbers(tokens, 3, seed=seed)}
    other_arguments = {
        "weight": numbers(3, 4, seed=seed + 1),
        "bias": numbers(3, seed=seed + 2),
        "silu": True,
    }
    return token_arguments, other_arguments, torch.full((5, 3, 3), torch.nan, dtype=torch.float64)


def state_space(tokens: int, seed: int) -> Drawn:
    token_arguments = {
        "x": numbers(tokens, 4, 3, seed=seed),
        "steps": numbers(tokens, 4, seed=seed + 1).abs(),
        "b": numbers(tokens, 2, 5, seed=seed + 2),
        "c": numbers(tokens, 2, 5, seed=seed + 3),
    }
    other_arguments = {"decay": -numbers(4, seed=seed + 4).abs(), "skip": numbers(4, seed=seed + 5)}
    return (
        token_arguments,
        other_arguments,
        torch.full((5, 4, 3, 5), torch.nan, dtype=torch.float64),
    )


def delta_rule(tokens: int, seed: int) -> Drawn:
    token_arguments = {
        "query": functional.normalize(numbers(tokens, 2, 5, seed=seed), dim=-1),
        "key": functional.normalize(numbers(tokens, 2, 5, seed=seed + 1), dim=-1),
        "value": numbers(tokens, 4, 3, seed=seed + 2),
        "decay": -numbers(tokens, 4, seed=seed + 3).abs(),
        "beta": 2 * numbers(tokens, 4, seed=seed + 4).sigmoid(),
    }
    return token_arguments, {"scale": 0.7}, torch.full((5, 4, 5, 3), torch.nan, dtype=torch.float64)


Draw = Callable[[int, int], Drawn]
OPS: dict[str, tuple[CustomOp[..., Any], str, Draw]] = {
    "causal_convolution": (causal_convolution, "windows", convolution),
    "state_space_scan": (state_space_scan, "states", state_space),
    "gated_delta_rule": (gated_delta_rule, "states", delta_rule),
}
each_op = pytest.mark.parametrize("name", OPS)


def step(
    name: str,
    token_arguments: dict[str, Any],
    other_arguments: dict[str, Any],
    states: torch.Tensor,
    lengths: list[int],
    slots: list[int],
    cached: list[int],
) -> torch.Tensor:
    op, pool, _ = OPS[name]
    places = {
        "query_starts": torch.tensor([0, *lengths]).cumsum(0),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "num_cached": torch.tensor(cached, dtype=torch.int64),
    }
    actual: torch.Tensor = op(**token_arguments, **other_arguments, **places, **{pool: states})
    return actual


@each_op
@few
@given(data=st.data(), seed=st.integers(0, 50))
def test_chunked_prefill_equals_one_step(name: str, data: st.DataObject, seed: int) -> None:
    """Split the sequences of one step over several steps, with padding and idle sequences."""
    _, pool, draw = OPS[name]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    slots = data.draw(st.permutations(range(5)))[: len(lengths)]
    token_arguments, other_arguments, states = draw(sum(lengths), seed)
    whole_states = states.clone()
    expected_y = step(
        name, token_arguments, other_arguments, whole_states, lengths, slots, [0] * len(lengths)
    )
    num_done, parts = [0] * len(lengths), [list[torch.Tensor]() for _ in lengths]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    while num_done != lengths:
        takes = [data.draw(st.integers(0, n - d)) for n, d in zip(lengths, num_done, strict=True)]
        takes = takes if any(takes) else [n - d for n, d in zip(lengths, num_done, strict=True)]
        rows = [
            s + d + i for s, d, n in zip(starts, num_done, takes, strict=True) for i in range(n)
        ]
        # One token of padding follows, a copy of the first token.
        chosen = {key: value[[*rows, 0]] for key, value in token_arguments.items()}
        actual = step(
            name, chosen, other_arguments, states, [*takes, 1], [*slots, -1], [*num_done, 7]
        )
        assert not actual[-1].any()
        for place, part in enumerate(actual[:-1].split(takes)):
            parts[place].append(part)
        num_done = [d + n for d, n in zip(num_done, takes, strict=True)]
    torch.testing.assert_close(torch.cat([torch.cat(part) for part in parts]), expected_y)
    torch.testing.assert_close(states, whole_states, equal_nan=True)
    unused = [row for row in range(5) if row not in slots]
    assert states[unused].isnan().all()
    assert pool in OPS[name][0].mutates


@each_op
def test_a_sequence_without_a_token_keeps_its_row(name: str) -> None:
    token_arguments, other_arguments, states = OPS[name][2](1, 0)
    before = states.clone()
    step(name, token_arguments, other_arguments, states, [0, 1, 0], [2, 1, -3], [4, 0, 0])
    unwritten_rows = [0, 2, 3, 4]
    assert torch.equal(states[unwritten_rows].isnan(), before[unwritten_rows].isnan())
    assert states[1].isfinite().all()


@each_op
def test_padding_alone_writes_nothing(name: str) -> None:
    token_arguments, other_arguments, states = OPS[name][2](2, 0)
    actual = step(name, token_arguments, other_arguments, states, [1, 1], [-1, -1], [0, 3])
    assert not actual.any()
    assert states.isnan().all()


@given(st.integers(1, 12), st.integers(2, 8), st.booleans(), st.integers(0, 50))
def test_the_convolution_equals_torch(tokens: int, num_taps: int, silu: bool, seed: int) -> None:
    x, weight = numbers(tokens, 3, seed=seed), numbers(3, num_taps, seed=seed + 1)
    bias = numbers(3, seed=seed + 2)
    windows = torch.full((1, 3, num_taps - 1), torch.nan, dtype=torch.float64)
    places = torch.tensor([0, tokens]), torch.tensor([0]), torch.tensor([0])
    actual = causal_convolution(x, weight, bias, windows, *places, silu)
    before = functional.pad(x.T, (num_taps - 1, 0))
    expected = functional.conv1d(before, weight[:, None], bias, groups=3).T
    torch.testing.assert_close(actual, functional.silu(expected) if silu else expected)
    torch.testing.assert_close(windows[0], before[:, -(num_taps - 1) :])


def test_lightning_attention_equals_a_state_space_of_unit_steps() -> None:
    """Decayed products of queries and keys weigh the values; the diagonal counts undecayed."""
    tokens, heads = 7, 3
    query, key, value = (numbers(tokens, heads, 5, seed=seed) for seed in range(3))
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    weights = torch.exp(-slopes[:, None, None] * distance).tril()
    scores = torch.einsum("tnd,snd->nts", query, key) * weights
    expected = torch.einsum("nts,snd->tnd", scores, value)
    states = torch.full((1, heads, 5, 5), torch.nan, dtype=torch.float64)
    steps = torch.ones(tokens, heads, dtype=torch.float64)
    places = torch.tensor([0, tokens]), torch.tensor([0]), torch.tensor([0])
    actual = state_space_scan(value, steps, -slopes, key, query, None, states, *places)
    torch.testing.assert_close(actual, expected)


def test_the_delta_rule_answers_a_key_with_its_newest_value() -> None:
    """Orthogonal keys keep their values; one that comes again gives up what it held."""
    key = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 1]][:, None]  # [T, 1, K]
    value = numbers(4, 1, 2, seed=0)
    states = torch.full((1, 1, 3, 2), torch.nan, dtype=torch.float64)
    places = torch.tensor([0, 4]), torch.tensor([0]), torch.tensor([0])
    gates = torch.zeros(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    actual = gated_delta_rule(key, key, value, *gates, states, *places, 1.0)
    torch.testing.assert_close(actual, value)
    torch.testing.assert_close(states[0, 0], value[[0, 3, 2], 0])
