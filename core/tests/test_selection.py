"""One mechanism chooses: pin, then score, then provider and name, whatever the order of install."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import Candidate, Kernel, Request, Verdict, select
from interposer.errors import ConfigError, NoCandidateError, UnknownNameError
from interposer.selection import pinned_name

REQUEST = Request("kernel", "linear", "bare", dtype="bfloat16", dims={"in_features": 64})


def candidate(
    name: str, provider: str = "acme", score: float = 10.0, refusal: str = "", traceback: str = ""
) -> Candidate:
    verdict = Verdict.refuse(refusal, traceback) if refusal else Verdict.accept()
    record = Kernel("linear", name, "acme.kernels:linear", score=score)
    return Candidate(name, provider, "1.0", score, record, lambda _: verdict)


names = st.sampled_from(["a", "b", "c", "d"])
drafts = st.tuples(names, names, st.sampled_from([0.0, 10.0, 20.0]), st.sampled_from(["", "no"]))
lists_of_candidates = st.lists(
    drafts, min_size=1, max_size=8, unique_by=lambda draft: draft[:2]
).map(lambda found: [candidate(*draft) for draft in found])


@given(lists_of_candidates, st.randoms(use_true_random=False))
def test_order_of_candidates_does_not_matter(
    candidates: list[Candidate], randomness: random.Random
) -> None:
    shuffled = randomness.sample(candidates, len(candidates))
    assert outcome(candidates) == outcome(shuffled)


def outcome(candidates: list[Candidate]) -> object:
    try:
        return select(REQUEST, candidates)
    except NoCandidateError as error:
        return str(error)


@given(lists_of_candidates)
def test_best_accepted_wins_and_every_other_has_a_reason(candidates: list[Candidate]) -> None:
    accepted = [c for c in candidates if c.judge(REQUEST)]
    if not accepted:
        with pytest.raises(NoCandidateError) as caught:
            select(REQUEST, candidates)
        assert len(caught.value.refusals) == len(candidates)
        return
    choice = select(REQUEST, candidates)
    best = min(accepted, key=lambda c: (-c.score, c.provider, c.name))
    assert choice.chosen is best
    others = {(c.name, c.origin) for c in candidates if c is not best}
    assert {(r.candidate, r.provider) for r in choice.refusals} == others
    assert len(choice.refusals) == len(others)
    assert all(refusal.reason for refusal in choice.refusals)


@given(lists_of_candidates, st.data())
def test_a_pin_is_met_or_raises(candidates: list[Candidate], data: st.DataObject) -> None:
    wanted = data.draw(st.sampled_from(candidates))
    if wanted.judge(REQUEST):
        choice = select(REQUEST, candidates, wanted.qualified_name)
        assert choice.chosen is wanted
        assert choice.why == "pinned by the configuration"
        assert len(choice.refusals) == len(candidates) - 1
    else:
        with pytest.raises(NoCandidateError, match="which the configuration pins"):
            select(REQUEST, candidates, wanted.qualified_name)


def test_highest_score_wins_and_the_outranked_keep_their_scores() -> None:
    choice = select(REQUEST, [candidate("slow", score=0.0), candidate("fast", score=20.0)])
    assert choice.chosen.name == "fast"
    assert choice.why == "highest score (20)"
    assert str(choice.refusals[0]) == "slow (acme 1.0): accepted, but outranked (score 0 < 20)"


def test_the_only_one_accepted_says_so() -> None:
    choice = select(REQUEST, [candidate("slow", score=0.0), candidate("fast", refusal="no avx2")])
    assert choice.chosen.name == "slow"
    assert choice.why == "the only one accepted"
    assert [str(refusal) for refusal in choice.refusals] == ["fast (acme 1.0): no avx2"]


@pytest.mark.parametrize(
    ("rivals", "winner"),
    [((("z", "acme"), ("a", "zeta")), "acme/z"), ((("b", "acme"), ("a", "acme")), "acme/a")],
)
def test_a_tie_is_decided_by_provider_then_name_and_said_so(
    rivals: tuple[tuple[str, str], ...], winner: str
) -> None:
    choice = select(REQUEST, [candidate(*rival) for rival in rivals])
    assert choice.chosen.qualified_name == winner
    assert choice.why == "tie at score 10, decided by provider and name"
    assert "ties with" in choice.refusals[0].reason
    assert "by provider and name" in choice.refusals[0].reason


def test_all_refused_raises_with_every_reason() -> None:
    candidates = [candidate("fast", refusal="no avx2"), candidate("odd", refusal="odd size")]
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, candidates)
    assert str(caught.value) == (
        "No candidate for kernel 'linear' [bfloat16 bare in_features=64].\n"
        "  fast (acme 1.0): no avx2\n"
        "  odd (acme 1.0): odd size"
    )


def test_no_candidate_at_all_raises() -> None:
    with pytest.raises(NoCandidateError, match="No installed plugin declares one"):
        select(REQUEST, [])


def test_traceback_of_a_failed_judge_is_kept() -> None:
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, [candidate("broken", refusal="it failed", traceback="Traceback ...")])
    assert caught.value.refusals[0].traceback == "Traceback ..."


@pytest.mark.parametrize("pin", ["slow", "acme/slow"])
def test_a_pin_by_name_or_by_provider_and_name(pin: str) -> None:
    choice = select(REQUEST, [candidate("slow", score=0.0), candidate("fast", score=20.0)], pin)
    assert choice.chosen.name == "slow"
    assert choice.refusals[0].reason == "accepted, but slow is pinned"


def test_an_ambiguous_pin_raises_and_offers_the_qualified_names() -> None:
    candidates = [candidate("fast", "zeta"), candidate("fast", "acme")]
    with pytest.raises(ConfigError, match="Try: 'acme/fast' or 'zeta/fast'"):
        select(REQUEST, candidates, "fast")
    assert select(REQUEST, candidates, "zeta/fast").chosen.provider == "zeta"


def test_a_pinned_one_that_refuses_raises_with_its_own_refusal_only() -> None:
    candidates = [candidate("fast", refusal="no avx2"), candidate("odd", refusal="odd size")]
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, [*candidates, candidate("slow")], "fast")
    assert [str(refusal) for refusal in caught.value.refusals] == ["fast (acme 1.0): no avx2"]
    assert str(caught.value).startswith("No 'fast' for kernel 'linear'")
    assert caught.value.action == "remove the pin; accepted here: 'slow'"


def test_an_unknown_pin_lists_the_known_nearest_first() -> None:
    with pytest.raises(UnknownNameError) as caught:
        select(REQUEST, [candidate("linear_tiled"), candidate("linear_packed")], "linear_pakced")
    assert str(caught.value) == (
        "Unknown kernel 'linear_pakced' for 'linear'. "
        "Known, nearest first: 'linear_packed', 'linear_tiled'."
    )


PLACES: list[tuple[Mapping[str, str], str | None]] = [
    ({}, None),
    ({"embedding": "x"}, None),
    ({"linear": "x"}, "x"),
    ({"linear": "x", "linear@layers.*": "y"}, "y"),
    ({"linear@layers.*": "y", "linear@layers.0.*": "z", "linear": "x"}, "z"),
    ({"linear@layers.1.*": "y", "linear": "x"}, "x"),
    ({"linear@layers.1.*": "y"}, None),
    ({"linear@*.mlp": "y"}, "y"),
    ({"linear@Layers.*": "y"}, None),
]


@pytest.mark.parametrize(("pins", "expected"), PLACES)
def test_the_most_specific_pin_of_a_place_counts(
    pins: Mapping[str, str], expected: str | None
) -> None:
    request = Request("kernel", "linear", prefix="layers.0.mlp")
    assert pinned_name(pins, request) == expected
    assert pinned_name(dict(reversed(list(pins.items()))), request) == expected
