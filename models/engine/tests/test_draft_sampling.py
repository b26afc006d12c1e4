"""Tokens that come out of drafts and their verification: drawn as if nobody had drafted."""

from __future__ import annotations

import pytest
import torch
from ops.tests.test_sampler import CPU

from interposer import Config, Registry, Resolver, Site
from interposer.tooling import Plugins
from interposer_engine._speculation.proposers import DraftSampling
from interposer_ops import plugin
from interposer_ops.layers.sampler import SamplingBatch
from interposer_ops.sampling import sample_tokens

NUM_ROWS = 100_000
VOCAB_SIZE = 6
NUM_DRAFTS = 2
LOGITS = torch.tensor(
    [
        [1.0, 0.2, -0.5, 0.4, -2.0, 0.9],
        [0.0, 2.0, 0.5, -1.0, 0.3, 0.1],
        [0.7, 0.6, 0.5, 0.4, 0.3, -3.0],
    ]
)
DRAFT_LOGITS = torch.tensor([0.2, 1.2, -0.4, 0.1, 0.3, 0.0])
PARAMS = {
    "temperature": (0.7, 0, 1.0, 0.0),
    "top-k and top-p": (1.3, 4, 0.85, 0.0),
    "min-p": (1.0, 0, 1.0, 0.4),
}


def sampling(certain: bool = False) -> DraftSampling:
    resolver = Resolver(Registry(Plugins.of(plugin)), CPU, Config(canary="off"))
    return DraftSampling(
        Site(resolver, "sampler", torch.float32), VOCAB_SIZE, NUM_DRAFTS, certain=certain
    )


def batch(
    params: tuple[float, int, float, float], seeds: torch.Tensor, steps: torch.Tensor
) -> SamplingBatch:
    temperature, top_k, top_p, min_p = params
    count = len(seeds)
    return SamplingBatch(
        torch.full((count,), temperature),
        torch.full((count,), top_k) if top_k else None,
        torch.full((count,), top_p) if top_p < 1 else None,
        torch.full((count,), min_p) if min_p else None,
        seeds,
        steps,
        None,
    )


def distribution(logits: torch.Tensor, params: tuple[float, int, float, float]) -> torch.Tensor:
    """Return the distribution of ``sample_tokens``, by its draws of other seeds than the tests'."""
    temperature, top_k, top_p, min_p = params
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[: top_k or VOCAB_SIZE]
    ranked = probs[kept] / probs[kept].sum()
    kept = kept[ranked.cumsum(0) - ranked < top_p]
    kept = kept[probs[kept] >= min_p * probs.max()]
    cut = torch.zeros_like(probs).index_copy(0, kept, probs[kept])
    return cut / cut.sum()


def assert_drawn_from(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-squared with 5 degrees of freedom at most: 35.9 is exceeded once in a million times."""
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).double()
    wanted = expected * len(tokens)
    possible = wanted > 0
    assert not counts[~possible].any()
    statistic = ((counts - wanted) ** 2 / wanted.clamp(min=1e-9))[possible].sum()
    assert statistic < 35.9, f"{(counts / len(tokens)).tolist()} for {expected.tolist()}"


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_every_token_is_drawn_from_the_target(name: str, certain: bool) -> None:
    params, made = PARAMS[name], sampling(certain)
    seeds, counts = torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), NUM_DRAFTS)
    # Some rows have fewer drafts, and some none.
    counts[::5], counts[1::50] = 1, 0
    places = torch.arange(NUM_DRAFTS + 1)
    of_row = torch.repeat_interleave(seeds, counts + 1)
    offset = torch.cat([places[: c + 1] for c in counts.tolist()])
    rows = batch(params, of_row, offset + 7)
    drafts = torch.full((NUM_ROWS, NUM_DRAFTS), 1)
    probs = None
    if not certain:
        drawn = [
            made.draw(DRAFT_LOGITS.expand(NUM_ROWS, -1), batch(params, ~seeds, counts * 0 + place))
            for place in range(7, 7 + NUM_DRAFTS)
        ]
        drafts = torch.stack([tokens for tokens, _ in drawn], 1)
        held = [mass for _, mass in drawn if mass is not None]
        probs = torch.stack(held, 1)
        assert_drawn_from(drafts[:, 0], distribution(DRAFT_LOGITS, params))
    tokens = made.verify(drafts, counts, LOGITS[offset], rows, probs)
    shares = []
    for place in range(NUM_DRAFTS + 1):
        actual = tokens[:, place]
        shares.append(float((actual >= 0).double().mean()))
        assert_drawn_from(actual[actual >= 0], distribution(LOGITS[place], params))
    assert shares[0] == 1
    assert shares[1] > shares[2] > 0.01


def test_a_row_without_draft_tokens_takes_the_sampled_token() -> None:
    params, seeds = PARAMS["top-k and top-p"], torch.arange(50)
    counts = torch.zeros(50, dtype=torch.int64)
    rows = batch(params, seeds, counts + 3)
    logits = LOGITS[:1].expand(50, -1)
    made = sampling(certain=True)
    tokens = made.verify(torch.zeros(50, NUM_DRAFTS, dtype=torch.int64), counts, logits, rows, None)
    columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.steps
    assert torch.equal(tokens[:, 0], sample_tokens(logits, *columns)[0])
    assert (tokens[:, 1:] == -1).all()


def test_greedy_rows_take_the_largest_logits() -> None:
    drafts, counts = torch.tensor([[0, 1], [0, 9], [5, 9]]), torch.tensor([2, 1, 1])
    logits = torch.cat([LOGITS, LOGITS[:2], LOGITS[:2]])
    tokens = sampling().verify_greedy(drafts, counts, logits)
    assert tokens.tolist() == [[0, 1, 0], [0, 1, -1], [0, -1, -1]]


def test_a_greedy_row_drafts_the_likeliest_token_in_any_batch() -> None:
    logits = torch.stack([LOGITS[1], DRAFT_LOGITS])
    mixed = batch(PARAMS["temperature"], torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert mixed.temperature is not None
    mixed.temperature[0] = 0
    tokens, probs = sampling().draw(logits, mixed)
    assert tokens[0] == 1
    assert probs is not None
    alone, none = sampling().draw(logits, SamplingBatch.greedy(2, "cpu"))
    assert alone.tolist() == [1, 1]
    assert none is None
