"""Verification of drafts: token by token, and the distribution of what comes out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.sampling import greedy_verify, rejection_sample


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 2**31))
def test_greedy_drafts_are_accepted_up_to_the_first_difference(
    batch_size: int, num_places: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # So few tokens that drafts are often right, and so few logits that ties are frequent.
    logits = torch.randint(3, (batch_size, num_places + 1, 3), generator=generator).float()
    drafts = torch.randint(3, (batch_size, num_places), generator=generator)
    counts = torch.randint(num_places + 1, (batch_size,), generator=generator)
    tokens, accepted = greedy_verify(drafts, logits, counts)
    for row in range(batch_size):
        expected = []
        for place in range(int(counts[row]) + 1):
            values = logits[row, place].tolist()
            expected.append(values.index(max(values)))
            if place == counts[row] or expected[-1] != drafts[row, place]:
                break
        assert accepted[row] == len(expected) - 1
        assert tokens[row].tolist() == expected + [-1] * (num_places + 1 - len(expected))


DRAFT = torch.tensor([0.5, 0.3, 0.2, 0.0])
TARGET = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.0, 0.5]])
NUM_ROWS = 40_000


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=4).double() / len(tokens)


def assert_drawn_from(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-squared with 3 degrees of freedom: 21.1 is exceeded once in 10,000 times."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=4).double()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[possible].sum()
    assert statistic < 21.1, f"{frequencies(tokens).tolist()} for {probabilities.tolist()}"


@pytest.mark.parametrize("certain", [False, True], ids=["drafted by chance", "drafts certain"])
def test_verified_tokens_follow_the_target_distribution(certain: bool) -> None:
    """Whatever the draft, the first token has the first distribution, the second the second."""
    generator = torch.Generator().manual_seed(7)
    if certain:
        drafts, draft_probs = torch.full((NUM_ROWS, 1), 1), None
    else:
        drafts = torch.multinomial(DRAFT, NUM_ROWS, replacement=True, generator=generator)[:, None]
        draft_probs = DRAFT.expand(NUM_ROWS, 1, 4)
    tokens, accepted = rejection_sample(
        drafts,
        draft_probs,
        TARGET.expand(NUM_ROWS, 2, 4),
        torch.ones(NUM_ROWS, dtype=torch.int64),
        torch.arange(NUM_ROWS),
        torch.full((NUM_ROWS,), 3),
    )
    assert_drawn_from(tokens[:, 0], TARGET[0])
    taken = accepted == 1
    # The chance of acceptance is what both distributions share: arXiv:2211.17192, theorem 3.5.
    chance = 0.4 if certain else float(torch.minimum(DRAFT, TARGET[0]).sum())
    assert abs(float(taken.double().mean()) - chance) < 4 * (chance / NUM_ROWS) ** 0.5
    assert_drawn_from(tokens[taken, 1], TARGET[1])
    assert (tokens[~taken, 1] == -1).all()


def test_a_draft_that_equals_the_target_is_always_accepted() -> None:
    drafts = torch.multinomial(DRAFT, 500, replacement=True)[:, None].expand(-1, 3).clone()
    probs = DRAFT.expand(500, 4, 4)
    count = torch.full((500,), 3)
    seeds = torch.arange(500)
    tokens, accepted = rejection_sample(drafts, probs[:, :3], probs, count, seeds, seeds)
    assert (accepted == 3).all()
    assert torch.equal(tokens[:, :3], drafts)
