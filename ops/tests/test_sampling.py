from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.sampling import apply_penalties, sample_tokens

NEGATIVE_INFINITY = float("-inf")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sample(
    logits: torch.Tensor,
    temperature: float | None = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    step: int = 0,
) -> tuple[list[int], torch.Tensor]:
    """Sample every row with the same parameters, and steps counted from ``step``."""
    rows = logits.shape[0]

    def column(value: float | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        return None if value is None else torch.full((rows,), value, dtype=dtype)

    tokens, logprobs = sample_tokens(
        logits,
        column(temperature),
        column(top_k, torch.int64),
        column(top_p),
        column(min_p),
        torch.full((rows,), seed),
        torch.arange(step, step + rows),
    )
    return tokens.tolist(), logprobs


# Penalties


def penalized(
    logits: list[float],
    prompt: list[bool],
    counts: list[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> list[float]:
    columns = (torch.tensor([value]) for value in (repetition, presence, frequency))
    out = apply_penalties(
        torch.tensor([logits]), torch.tensor([prompt]), torch.tensor([counts]), *columns
    )
    assert out.dtype == torch.float32
    return out[0].tolist()


def test_repetition_counts_prompt_and_output_once() -> None:
    actual = penalized(
        [4.0, -4.0, 4.0, -4.0, 4.0, 0.0],
        [True, True, False, False, False, True],
        [0, 0, 1, 7, 0, 2],
        repetition=2.0,
    )
    assert actual == [2.0, -8.0, 2.0, -8.0, 4.0, 0.0]


def test_presence_counts_output_once() -> None:
    assert penalized([1.0, 1.0, 1.0], [True, False, True], [0, 1, 5], presence=0.5) == [1, 0.5, 0.5]


def test_frequency_counts_output_each_time() -> None:
    assert penalized([1.0, 1.0, 1.0], [True, False, True], [0, 1, 5], frequency=0.5) == [
        1,
        0.5,
        -1.5,
    ]


def test_negative_penalties_and_repetition_below_one_encourage() -> None:
    actual = penalized([2.0, -2.0], [False, False], [1, 3], 0.5, presence=-1.0, frequency=-0.25)
    assert actual == [2.0 / 0.5 + 1 + 0.25, -2.0 * 0.5 + 1 + 0.75]


def test_repetition_goes_before_the_others() -> None:
    assert penalized([3.0], [False], [2], 2.0, presence=1.0, frequency=0.5) == [3.0 / 2 - 1 - 1]


def test_penalties_keep_masked_tokens_masked() -> None:
    actual = penalized([NEGATIVE_INFINITY, 1.0], [True, False], [3, 0], 0.5, -2.0, -2.0)
    assert actual == [NEGATIVE_INFINITY, 1.0]


def test_rows_have_their_own_penalties() -> None:
    out = apply_penalties(
        torch.full((2, 2), 4.0),
        torch.tensor([[True, False], [True, False]]),
        torch.zeros(2, 2, dtype=torch.int32),
        torch.tensor([2.0, 4.0]),
        torch.zeros(2),
        torch.zeros(2),
    )
    assert out.tolist() == [[2.0, 4.0], [1.0, 4.0]]


@given(
    seed=st.integers(0, 2**32),
    penalty=st.floats(0.1, 10),
    used=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    prompt_length=st.integers(0, 30),
)
def test_repetition_equals_transformers(
    seed: int, penalty: float, used: list[int], prompt_length: int
) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = normal(1, 20, seed=seed, dtype=torch.float64)
    prompt, output = used[:prompt_length], Counter(used[prompt_length:])
    actual = apply_penalties(
        logits,
        torch.tensor([[token in prompt for token in range(20)]]),
        torch.tensor([[output[token] for token in range(20)]]),
        torch.tensor([penalty], dtype=torch.float64),
        torch.zeros(1),
        torch.zeros(1),
    )
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(actual, processor(torch.tensor([used]), logits))


# Drawing


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ({"top_k": 3}, {1, 4, 5}),
        ({"top_p": 0.5}, {4}),
        ({"top_p": 0.7}, {1, 4}),
        ({"min_p": 0.45}, {1, 4}),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.3}, {1, 4}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.0}, {4}),
        ({"min_p": 1.0}, {4}),
    ],
)
def test_only_kept_tokens_are_drawn(truncation: dict[str, Any], expected: set[int]) -> None:
    weights = torch.tensor([0.05, 0.25, 0.04, 0.06, 0.5, 0.1])
    tokens, _ = sample(weights.log().expand(2000, -1), **truncation)
    assert set(tokens) == expected


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities))
    expected = probabilities.double() * len(tokens)
    drawn = expected > 0
    assert not counts[~drawn].any()
    return float(((counts - expected).square() / expected)[drawn].sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_over_steps(temperature: float) -> None:
    logits = normal(8, seed=1)
    tokens, _ = sample(logits.expand(40_000, -1), temperature, seed=11)
    assert chi_square(tokens, (logits / temperature).softmax(-1)) < 24.3  # 0.1 % at 7 degrees


def test_tokens_follow_the_softmax_over_seeds() -> None:
    logits, rows = normal(8, seed=2), 40_000
    ones = torch.ones(rows)
    tokens, _ = sample_tokens(
        logits.expand(rows, -1), ones, None, None, None, torch.arange(rows), ones.long()
    )
    assert chi_square(tokens.tolist(), logits.softmax(-1)) < 24.3  # 0.1 % at 7 degrees of freedom


def test_tokens_follow_the_truncated_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 1.5, -1.0, 0.0])
    tokens, _ = sample(logits.expand(40_000, -1), top_k=3)
    probabilities = logits.masked_fill(logits < 1, NEGATIVE_INFINITY).softmax(-1)
    assert chi_square(tokens, probabilities) < 13.8  # 0.1 % at 2 degrees of freedom


@pytest.mark.slow
def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    rows, weight = 2000, 4e-5
    logits = torch.zeros(rows, 5001)
    logits[:, 1:] = math.log(weight)  # together 1/6 of the probability
    tokens, _ = sample(logits)
    drawn = sum(token > 0 for token in tokens)
    assert abs(drawn - rows / 6) < 4 * math.sqrt(rows * 5 / 36)


def test_a_seed_gives_the_same_tokens_in_every_batch() -> None:
    rows, vocab_size = 12, 503
    logits = 2 * normal(rows, vocab_size, seed=3)
    columns = (
        torch.linspace(0, 1.5, rows),
        torch.arange(rows) * 7,
        torch.linspace(0.5, 1, rows),
        torch.linspace(0, 0.1, rows),
        torch.arange(rows) * 10**17 - 5,
        torch.arange(rows),
    )
    tokens, logprobs = sample_tokens(logits, *columns)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    shuffled, _ = sample_tokens(logits[order], *(column[order] for column in columns))
    assert torch.equal(shuffled, tokens[order])
    for row in range(rows):
        at = slice(row, row + 1)
        alone, logprob = sample_tokens(logits[at], *(column[at] for column in columns))
        assert torch.equal(alone, tokens[at])
        torch.testing.assert_close(logprob, logprobs[at])


def test_seed_and_step_decide_the_tokens() -> None:
    logits = torch.zeros(64, 1000)
    first, again, other = (sample(logits, seed=seed)[0] for seed in (5, 5, 6))
    later, _ = sample(logits, seed=5, step=1)
    assert first == again
    assert first[1:] == later[:-1]
    assert sum(a == b for a, b in zip(first, other, strict=True)) <= 2
    assert len(set(first)) > 55  # of 62 to be expected of 64 draws of 1000


def test_truncation_does_not_move_the_noise() -> None:
    logits = 2 * normal(300, 50, seed=4)
    free, _ = sample(logits)
    cut, _ = sample(logits, top_k=10)
    ranks = logits.argsort(descending=True).argsort()
    inside = [row for row, token in enumerate(free) if ranks[row, token] < 10]
    assert 100 < len(inside) < 300
    assert all(free[row] == cut[row] for row in inside)


# Greedy and the edges


@pytest.mark.parametrize("temperature", [None, 0.0])
@DTYPES
def test_greedy_takes_the_first_of_equals(temperature: float | None, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0, 5, 5, 1], [2, 2, 2, 2], [-3, -3, -2, -2]], dtype=dtype)
    assert sample(logits, temperature, top_k=2, top_p=0.1, min_p=0.5)[0] == [1, 0, 2]
    assert sample(logits, temperature)[0] == [1, 0, 2]


def test_greedy_rows_stay_greedy_beside_random_ones() -> None:
    logits = normal(400, 100, seed=5)
    temperature = torch.ones(400)
    temperature[::2] = 0
    steps = torch.arange(400)
    tokens, _ = sample_tokens(logits, temperature, None, None, None, steps, steps)
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert (tokens[1::2] != logits[1::2].argmax(-1)).sum() > 150


def test_a_tiny_temperature_is_greedy() -> None:
    logits = 30 * normal(50, 100, seed=6)
    assert sample(logits, 1e-38, top_p=0.9)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [None, 1.0, 3.0])
def test_masked_tokens_are_never_sampled(temperature: float | None) -> None:
    logits = torch.full((500, 20), NEGATIVE_INFINITY)
    logits[:, 7] = -50.0
    tokens, logprobs = sample(logits, temperature, top_k=5, top_p=0.9, min_p=0.1)
    assert tokens == [7] * 500
    assert not logprobs.any()
    logits[:, 3] = -50.0
    assert set(sample(logits, temperature)[0]) == ({3} if temperature is None else {3, 7})


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_vocabulary_of_one_token(temperature: float | None) -> None:
    tokens, logprobs = sample(normal(3, 1, seed=7), temperature, top_k=1, top_p=0.5, min_p=0.5)
    assert tokens == [0, 0, 0]
    assert not logprobs.any()


@pytest.mark.parametrize("temperature", [None, 1.0])
@DTYPES
def test_logprobs_ignore_temperature_and_truncation(
    temperature: float | None, dtype: torch.dtype
) -> None:
    logits = (4 * normal(30, 200, seed=8)).to(dtype)
    tokens, logprobs = sample(logits, temperature, top_k=3, top_p=0.9)
    expected = logits.double().log_softmax(-1)[torch.arange(30), tokens]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.float())
