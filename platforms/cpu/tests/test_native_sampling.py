"""Sampling and routing by the compiled library; the C++ tests check every level.

Dimensions: B sequences, V vocabulary, T tokens, E experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from interposer import Config, current_registry
from interposer.errors import RequestError
from interposer_cpu import native
from interposer_cpu._kernels import routing, sampling
from interposer_cpu._platform import CPUPlatform
from interposer_ops.experts import grouped_topk, topk_sigmoid, topk_softmax
from interposer_ops.sampling import apply_penalties, gumbel_argmax, sample_tokens
from interposer_testing import Trial, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

OPS = {
    "apply_penalties",
    "grouped_topk",
    "gumbel_argmax",
    "sample_tokens",
    "topk_sigmoid",
    "topk_softmax",
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
NOTHING = float("-inf")

# Temperature, top_k, top_p, min_p. Wide truncations take more than one round of candidates.
Setting = tuple[float | None, int | None, float | None, float | None]
SETTINGS: tuple[Setting, ...] = (
    (None, None, None, None),
    (0.7, None, None, None),
    (1.3, 20, 0.9, 0.02),
    (1.0, 1, None, None),
    (1.0, 3000, None, None),
    (1.0, 5000, 0.999, None),
    (0.9, None, 0.8, None),
    (5.0, None, 0.97, None),
    (1.5, None, None, 0.1),
    (1e-40, None, 0.9, None),
)


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def trials() -> Iterator[Trial]:
    device = CPUPlatform().devices()[0]
    registry = current_registry(Config(isolation="off"))
    for op in sorted(OPS):
        for trial in conformance(
            registry, device, distribution="interposer-cpu", op=op, quick=True
        ):
            if trial.candidate.record.name == f"{op}_native" and trial.aspect == "numerics":
                yield trial


def column(value: float | None, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if value is None else torch.full((rows,), value, dtype=dtype)


def arguments(logits: torch.Tensor, setting: Setting, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rows = logits.shape[0]
    generator = torch.Generator().manual_seed(seed)
    temperature, top_k, top_p, min_p = setting
    return (
        logits,
        column(temperature, rows, torch.float32),
        column(top_k, rows, torch.int64),
        column(top_p, rows, torch.float32),
        column(min_p, rows, torch.float32),
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        torch.randint(1000, (rows,), generator=generator),
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str, forced: None) -> None:
    native.force_level(level)
    ran = set()
    for trial in trials():
        assert trial.run() == [], str(trial)
        ran.add(trial.candidate.name.removesuffix("_native"))
    assert ran == OPS


@pytest.mark.landing(9)
@DTYPES
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_of_a_large_vocabulary_equal_the_reference(
    setting: Setting, dtype: torch.dtype
) -> None:
    # Rows that are drawn without regard to margins: two values within a rounding of each other
    # would be one in some ten thousand, and these seeds hold none.
    logits = 3 * torch.randn(6, 40_003, generator=torch.Generator().manual_seed(1))
    given = arguments(logits.to(dtype), setting)
    expected, expected_logprobs = sample_tokens.reference(*given)
    tokens, logprobs = sampling.sample_tokens(*given)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_do_not_depend_on_threads_and_other_rows(
    setting: Setting, threads: Callable[[int], None]
) -> None:
    given = arguments(torch.randn(5, 50_000, generator=torch.Generator().manual_seed(2)), setting)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(sampling.sample_tokens(*given))
    alone = [
        sampling.sample_tokens(
            *(None if argument is None else argument[row : row + 1] for argument in given)
        )
        for row in range(5)
    ]
    results.append((torch.cat([one[0] for one in alone]), torch.cat([one[1] for one in alone])))
    for tokens, logprobs in results[1:]:
        assert torch.equal(tokens, results[0][0])
        assert torch.equal(logprobs, results[0][1])


def test_draws_follow_the_softmax() -> None:
    rows = 40_000
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    logits = weights.log().expand(rows, 5)
    steps = torch.arange(rows)
    seeds = torch.full((rows,), 3)
    ones = torch.ones(rows)
    top_p = torch.full((rows,), 0.65)
    for cut, kept in ((None, weights), (top_p, weights * torch.tensor([1, 1, 0, 0, 0]))):
        tokens, _ = sampling.sample_tokens(logits, ones, None, cut, None, seeds, steps)
        counts = Counter(tokens.tolist())
        expected = rows * kept / kept.sum()
        for token, mean in enumerate(expected.tolist()):
            # Five standard deviations of a binomial variable, at most sqrt(n) / 2 each.
            assert abs(counts[token] - mean) <= (2.5 * rows**0.5 if mean else 0)


@DTYPES
def test_the_lowest_index_wins_ties_across_parts(dtype: torch.dtype) -> None:
    for width in (1, 15, 16, 17, 4095, 4096, 4097, 12_289):
        logits = torch.zeros(3, width, dtype=dtype)
        logits[1, width // 2 :] = 1
        logits[2, -1] = 1
        tokens, logprobs = sampling.sample_tokens(*arguments(logits, SETTINGS[0]))
        assert tokens.tolist() == logits.argmax(-1).tolist()
        expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)


def test_invalid_distributions_give_the_reference_result() -> None:
    logits = torch.zeros(4, 5000)
    logits[0, 4711] = logits[0, 4999] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = NOTHING
    logits[3, 123:] = NOTHING
    expected, expected_logprobs = sample_tokens.reference(*arguments(logits, SETTINGS[0]))
    tokens, logprobs = sampling.sample_tokens(*arguments(logits, SETTINGS[0]))
    assert tokens.tolist() == expected.tolist() == [4711, 17, 0, 0]
    torch.testing.assert_close(logprobs, expected_logprobs, equal_nan=True)
    for setting in SETTINGS[1:]:
        tokens, _ = sampling.sample_tokens(*arguments(logits, setting))
        assert (tokens >= 0).all()
        assert (tokens < 5000).all()
        assert tokens[3] < 123


@pytest.mark.landing(1)
@pytest.mark.parametrize("counts", [torch.int32, torch.int64])
def test_penalties_of_a_large_vocabulary_equal_the_reference(
    counts: torch.dtype, threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(3)
    given = (
        4 * torch.randn(3, 40_003, generator=generator),
        torch.rand(3, 40_003, generator=generator) < 0.3,
        torch.randint(-3, 4, (3, 40_003), generator=generator).clamp(min=0).to(counts),
        torch.tensor([1.0, 1.2, 0.7]),
        torch.tensor([0.0, -1.5, 0.5]),
        torch.tensor([0.0, 0.25, -1.0]),
    )
    threads(2)
    actual = sampling.apply_penalties(*given)
    torch.testing.assert_close(actual, apply_penalties.reference(*given), rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[0], given[0][0])


def test_gumbel_argmax_draws_the_tokens_of_sample_tokens() -> None:
    logits = torch.randn(64, 999, generator=torch.Generator().manual_seed(4))
    given = arguments(logits, (0.8, None, None, None))
    actual = sampling.gumbel_argmax(given[0], given[1], *given[5:])
    assert torch.equal(actual, sampling.sample_tokens(*given)[0])
    assert torch.equal(actual, gumbel_argmax.reference(given[0], given[1], *given[5:]))


def test_noncontiguous_columns_and_rows_are_accepted() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(5)).T
    given = arguments(logits, (0.9, 7, 0.9, 0.01))
    apart = tuple(
        argument if argument.ndim == 2 else torch.stack((argument, argument), 1)[:, 1]
        for argument in given
    )
    expected = sample_tokens.reference(*given)
    assert torch.equal(sampling.sample_tokens(*apart)[0], expected[0])


@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_equal_or_excluded_experts_come_in_index_order(top_k: int) -> None:
    logits = torch.tensor([0.0, -0.0, 1.0, NOTHING] * 10)[None].repeat(3, 1)
    logits[1] = NOTHING
    logits[1, 39] = -1e38
    logits[2] = torch.arange(40.0)
    for op, function, rest in (
        (topk_softmax, routing.topk_softmax, (top_k, True)),
        (topk_sigmoid, routing.topk_sigmoid, (None, top_k, False, 2.0)),
        (grouped_topk, routing.grouped_topk, (None, 5, 5, top_k, "sigmoid", True, 1.0)),
    ):
        expected, ids = op.reference(logits, *rest)
        weights, actual = function(logits, *rest)
        assert torch.equal(actual, ids), op.name
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def test_a_group_of_negative_scores_does_not_win_by_its_padding() -> None:
    logits = torch.full((1, 12), -20.0)
    logits[0, 5] = -10.0
    bias = torch.full((12,), -4.0)
    given = (logits, bias, 3, 1, 2, "sigmoid", False, 1.0)
    weights, ids = routing.grouped_topk(*given)
    assert ids.tolist() == grouped_topk.reference(*given)[1].tolist() == [[5, 4]]
    torch.testing.assert_close(weights, grouped_topk.reference(*given)[0], rtol=1e-6, atol=0)


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(RequestError, match="No scoring 'relu' of experts"):
        routing.grouped_topk(torch.zeros(1, 4), None, 2, 1, 1, "relu", False, 1.0)


def test_calls_with_too_few_arguments_are_refused() -> None:
    library = native.library()
    for name in ("sample_tokens", "penalise", "route"):
        with pytest.raises(TypeError, match="arguments, got 1"):
            getattr(library, name)(1)
