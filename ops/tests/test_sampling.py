from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import CustomOp
from interposer_ops.noise import gumbel_noise, uniform_noise
from interposer_ops.sampling import apply_penalties, sample_tokens
from interposer_ops.truncation import temper, truncation_threshold

NEGATIVE_INFINITY = float("-inf")
OPS = pytest.mark.parametrize("op", [apply_penalties, sample_tokens], ids=lambda op: op.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(scope="module")
def processors() -> ModuleType:
    """Logits processors of transformers, which many models' generation settings are written for."""
    module: ModuleType = pytest.importorskip(
        "transformers.generation.logits_process", reason="needs transformers"
    )
    return module


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


# Cases


@OPS
@DTYPES
def test_cases_are_the_same_for_the_same_seed(op: CustomOp[Any, Any], dtype: torch.dtype) -> None:
    first, second, other = (list(op.cases(dtype, seed)) for seed in (3, 3, 4))
    labels = [case.label for case in first]
    assert len(set(labels)) == len(labels)
    assert labels == [case.label for case in other]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(dict(a.arguments), dict(b.arguments), rtol=0, atol=0)
    assert not torch.equal(first[0].arguments["logits"], other[0].arguments["logits"])


@OPS
@DTYPES
def test_cases_agree_with_float64_within_the_tolerance(
    op: CustomOp[Any, Any], dtype: torch.dtype
) -> None:
    for case in op.cases(dtype, seed=0):
        wide = {
            name: value.double()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in case.arguments.items()
        }
        found, expected = op(**case.arguments), op(**wide)
        pairs = zip(found, expected, strict=True) if op is sample_tokens else [(found, expected)]
        for got, exact in pairs:
            bound = op.tolerance.bound(exact, got.dtype, case)
            assert ((got - exact).abs() <= bound).all(), case.label


@OPS
@DTYPES
def test_fake_results_look_like_real_ones(op: CustomOp[Any, Any], dtype: torch.dtype) -> None:
    for case in op.cases(dtype, seed=0):
        real, fake = op(**case.arguments), op.fake(**case.arguments)
        pairs = zip(real, fake, strict=True) if op is sample_tokens else [(real, fake)]
        for a, b in pairs:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), case.label


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
    found = penalized(
        [4.0, -4.0, 4.0, -4.0, 4.0, 0.0],
        [True, True, False, False, False, True],
        [0, 0, 1, 7, 0, 2],
        repetition=2.0,
    )
    assert found == [2.0, -8.0, 2.0, -8.0, 4.0, 0.0]


def test_presence_counts_output_once() -> None:
    assert penalized([1.0, 1.0, 1.0], [True, False, True], [0, 1, 5], presence=0.5) == [1, 0.5, 0.5]


def test_frequency_counts_output_each_time() -> None:
    assert penalized([1.0, 1.0, 1.0], [True, False, True], [0, 1, 5], frequency=0.5) == [
        1,
        0.5,
        -1.5,
    ]


def test_negative_penalties_and_repetition_below_one_encourage() -> None:
    found = penalized([2.0, -2.0], [False, False], [1, 3], 0.5, presence=-1.0, frequency=-0.25)
    assert found == [2.0 / 0.5 + 1 + 0.25, -2.0 * 0.5 + 1 + 0.75]


def test_repetition_goes_before_the_others() -> None:
    assert penalized([3.0], [False], [2], 2.0, presence=1.0, frequency=0.5) == [3.0 / 2 - 1 - 1]


def test_penalties_keep_tokens_that_are_ruled_out() -> None:
    found = penalized([NEGATIVE_INFINITY, 1.0], [True, False], [3, 0], 0.5, -2.0, -2.0)
    assert found == [NEGATIVE_INFINITY, 1.0]


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
def test_repetition_is_what_transformers_does(
    processors: ModuleType, seed: int, penalty: float, used: list[int], prompt_length: int
) -> None:
    logits = normal(1, 20, seed=seed, dtype=torch.float64)
    prompt, output = used[:prompt_length], Counter(used[prompt_length:])
    found = apply_penalties(
        logits,
        torch.tensor([[token in prompt for token in range(20)]]),
        torch.tensor([[output[token] for token in range(20)]]),
        torch.tensor([penalty], dtype=torch.float64),
        torch.zeros(1),
        torch.zeros(1),
    )
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(found, processor(torch.tensor([used]), logits))


# Truncation


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 60),
    temperature=st.sampled_from([0.1, 0.5, 1.0, 1.7, 5.0]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.integers(0, 99).map(lambda percent: percent / 100),
    min_p=st.none() | st.integers(0, 100).map(lambda percent: percent / 100),
)
def test_the_kept_set_is_that_of_transformers(
    processors: ModuleType,
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    logits = 3 * normal(4, vocab_size, seed=seed, dtype=torch.float64)
    chain = processors.LogitsProcessorList([processors.TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        chain.append(processors.TopKLogitsWarper(top_k))
    if top_p is not None:
        chain.append(processors.TopPLogitsWarper(top_p))
    if min_p is not None:
        chain.append(processors.MinPLogitsWarper(min_p))
    expected = chain(torch.zeros(4, 1, dtype=torch.int64), logits).isfinite()

    def column(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.full((4,), value, dtype=torch.float64)

    scaled = temper(logits, torch.full((4,), temperature, dtype=torch.float64))
    ranks = None if top_k is None else torch.full((4,), top_k)
    kept = scaled >= truncation_threshold(scaled, ranks, column(top_p), column(min_p))
    assert torch.equal(kept, expected)


def test_neutral_values_keep_what_none_keeps() -> None:
    scaled = temper(5 * normal(3, 1000, seed=0), torch.ones(3))
    zeros = torch.zeros(3)
    threshold = truncation_threshold(scaled, zeros.long(), zeros + 1, zeros)
    assert (scaled >= threshold).all()
    assert torch.equal(
        threshold <= scaled, truncation_threshold(scaled, None, None, None) <= scaled
    )


def test_equal_tokens_are_kept_together() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -2.0]])
    kept = scaled >= truncation_threshold(scaled, torch.tensor([2]), None, None)
    assert kept.tolist() == [[True, True, True, False]]
    kept = scaled >= truncation_threshold(scaled, None, torch.tensor([0.6]), None)
    assert kept.tolist() == [[True, True, True, False]]


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


# Drawing


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


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    rows, weight = 2000, 4e-5
    logits = torch.zeros(rows, 5001)
    logits[:, 1:] = math.log(weight)  # together 1/6 of the probability
    tokens, _ = sample(logits)
    drawn = sum(token > 0 for token in tokens)
    assert abs(drawn - rows / 6) < 4 * math.sqrt(rows * 5 / 36)


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
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
def test_ruled_out_tokens_are_never_taken(temperature: float | None) -> None:
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
def test_logprobs_are_those_of_the_logits_as_given(
    temperature: float | None, dtype: torch.dtype
) -> None:
    logits = (4 * normal(30, 200, seed=8)).to(dtype)
    tokens, logprobs = sample(logits, temperature, top_k=3, top_p=0.9)
    expected = logits.double().log_softmax(-1)[torch.arange(30), tokens]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.float())


@DTYPES
def test_arguments_are_left_alone(dtype: torch.dtype) -> None:
    for op in (apply_penalties, sample_tokens):
        for case in op.cases(dtype, seed=1):
            before = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in case.arguments.items()
            }
            op(**case.arguments)
            torch.testing.assert_close(dict(case.arguments), before, rtol=0, atol=0)


# Noise

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """SplitMix64's finalizer in unbounded integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def test_the_test_knows_split_mix() -> None:
    outputs = [mix(GAMMA * n % WORD) for n in (1, 2, 3)]  # of a generator that starts at 0
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**40), token=st.integers(0, 300))
def test_uniform_noise_is_bit_for_bit_what_it_says(seed: int, step: int, token: int) -> None:
    key = mix((mix(seed % WORD) + (step + 1) * GAMMA) % WORD)
    bits = mix((key + (token + 1) * GAMMA) % WORD) >> 24 | 1
    (exact,) = struct.unpack("f", struct.pack("f", bits * 2.0**-40))
    found = uniform_noise(torch.tensor([seed]), torch.tensor([step]), token + 1)
    assert found.dtype == torch.float32
    assert float(found[0, token]) == min(exact, 1 - 2.0**-24)


def noise(seeds: range, steps: range, num_tokens: int) -> torch.Tensor:
    """Return uniform noise ``[seeds, steps, tokens]`` in float64."""
    pairs = torch.tensor(list(itertools.product(seeds, steps)))
    flat = uniform_noise(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), num_tokens)
    return flat.double().reshape(len(seeds), len(steps), num_tokens)


def test_noise_is_uniform() -> None:
    u = noise(range(20), range(20), 500)
    assert 0 < float(u.min()) < float(u.max()) < 1
    count = u.numel()
    assert abs(float(u.mean()) - 1 / 2) < 4 / math.sqrt(12 * count)
    assert abs(float(u.var()) - 1 / 12) < 4 / math.sqrt(180 * count)
    bins = (u * 100).long().flatten().tolist()
    assert chi_square(bins, torch.full((100,), 0.01)) < 148.2  # 0.1 % at 99 degrees of freedom


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_seeds_steps_and_tokens_do_not_correlate(axis: int, lag: int) -> None:
    u = noise(range(60), range(60), 60) - 0.5
    length = u.shape[axis] - lag
    products = u.narrow(axis, 0, length) * u.narrow(axis, lag, length) * 12
    assert abs(float(products.mean())) < 4 / math.sqrt(products.numel())


def test_seed_and_step_are_not_interchangeable() -> None:
    u = noise(range(30), range(30), 10)
    mirrored = u.transpose(0, 1)
    off_diagonal = ~torch.eye(30, dtype=torch.bool)
    assert not (u == mirrored)[off_diagonal].any()
    assert len(u.flatten().unique()) > 0.99 * u.numel()


def test_gumbel_noise_has_mean_and_variance_of_its_distribution() -> None:
    g = gumbel_noise(torch.arange(100), torch.arange(100), 5000, torch.float64)
    count = g.numel()
    assert abs(float(g.mean()) - 0.5772156649) < 4 * math.pi / math.sqrt(6 * count)
    assert abs(float(g.var()) - math.pi**2 / 6) < 4 * math.sqrt(4.4 / count) * math.pi**2 / 6
    assert g.isfinite().all()


def test_gumbel_noise_of_both_dtypes_differs_by_rounding() -> None:
    seeds = torch.arange(100)
    narrow, wide = (gumbel_noise(seeds, seeds, 5000, d) for d in (torch.float32, torch.float64))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)
