"""One mechanism chooses, by one order of rules, whatever the order of install."""

from __future__ import annotations

import random
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import Candidate, Capability, Choice, Kernel, OpEntry, Request, Verdict, select
from interposer._config.policy import Policy
from interposer._config.rules import REQUIRABLE
from interposer._contract.choice import Measured
from interposer._selection.select import Gate
from interposer.errors import ConfigError, NoCandidateError, UnknownNameError

REQUEST = Request("kernel", "linear", "bare", dtype="bfloat16", dims={"in_features": 64})
TABLE = "the table 'bare'"
HERE = "unknown"  # the architecture of a request that names none


def candidate(
    name: str,
    provider: str = "acme",
    score: float = 10.0,
    refusal: str = "",
    properties: frozenset[str] = frozenset(),
    proven_on: frozenset[str] | None = None,
    traceback: str = "",
) -> Candidate:
    verdict = Verdict.refuse(refusal, traceback) if refusal else Verdict.accept()
    record = Kernel(
        "linear",
        name,
        "acme.kernels:linear",
        score=score,
        properties=properties,
        proven_on=proven_on,
    )
    return Candidate(name, provider, "1.0", score, record, lambda _: verdict)


def untouchable(name: str) -> Candidate:
    def judge(_: Request) -> Verdict:
        raise AssertionError(f"{name} was judged")

    return replace(candidate(name), judge=judge)


def refusing(*wrong: str) -> tuple[Gate, ...]:
    def gate(_: Request, c: Candidate) -> Verdict:
        return Verdict.refuse("wrong numbers") if c.qualified_name in wrong else Verdict.accept()

    return (gate,)


names = st.sampled_from(["a", "b", "c", "d"])
properties = st.sets(st.sampled_from(["deterministic", "graph_safe"])).map(frozenset)
drafts = st.tuples(
    names,
    names,
    st.sampled_from([0.0, 10.0, 20.0]),
    st.sampled_from(["", "", "no"]),
    properties,
    st.sampled_from([None, None, frozenset({HERE, "sm_1"}), frozenset({"sm_1"}), frozenset()]),
)
lists_of_candidates = st.lists(
    drafts, min_size=1, max_size=8, unique_by=lambda draft: draft[:2]
).map(lambda found: [candidate(*draft) for draft in found])
globs = st.sampled_from(["a", "b", "a/*", "c/b", "*", "[cd]", "z"])
wishes: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict),
    st.fixed_dictionaries({"pin": st.sampled_from(["a", "b", "a/b", "c/c"])}),
    st.fixed_dictionaries({"prefer": st.lists(globs, min_size=1, max_size=3).map(tuple)}),
)
policies = st.builds(
    lambda wish, forbid, require, strict: Policy(
        **wish, forbid=forbid, require=require, strict=strict
    ),
    wishes,
    st.sets(globs, max_size=1).map(frozenset),
    st.one_of(st.just(frozenset[str]()), properties),
    st.booleans(),
)
figures = st.one_of(
    st.none(),
    st.dictionaries(
        st.builds("{}/{}".format, names, names), st.sampled_from([1e-6, 2e-6, 5e-5]), max_size=6
    ).map(lambda seconds: Measured(seconds, TABLE)),
)
refuters = st.sets(st.builds("{}/{}".format, names, names), max_size=6)


def outcome(
    candidates: list[Candidate], policy: Policy, measured: Measured | None, wrong: set[str]
) -> Choice | tuple[type[Exception], str]:
    try:
        return select(REQUEST, candidates, policy, measured=measured, gates=refusing(*wrong))
    except (NoCandidateError, ConfigError) as error:
        return type(error), str(error)


@given(lists_of_candidates, policies, figures, refuters, st.randoms(use_true_random=False))
def test_order_of_candidates_does_not_matter(
    candidates: list[Candidate],
    policy: Policy,
    measured: Measured | None,
    wrong: set[str],
    randomness: random.Random,
) -> None:
    shuffled = randomness.sample(candidates, len(candidates))
    assert outcome(candidates, policy, measured, wrong) == outcome(
        shuffled, policy, measured, wrong
    )


def meant(glob: str, c: Candidate) -> bool:
    return fnmatchcase(c.name, glob) or fnmatchcase(f"{c.provider}/{c.name}", glob)


def proven(c: Candidate) -> bool:
    assert isinstance(c.record, Kernel)
    return c.record.proven_on is None or HERE in c.record.proven_on


def allowed(c: Candidate, policy: Policy, wrong: set[str]) -> bool:
    forbidden = any(meant(glob, c) for glob in policy.forbid)
    promised = policy.require <= c.properties
    return not forbidden and promised and bool(c.judge(REQUEST)) and c.qualified_name not in wrong


@given(lists_of_candidates, policies, figures, refuters)
def test_pin_then_preference_then_time_then_proof_then_score_then_names(
    candidates: list[Candidate], policy: Policy, measured: Measured | None, wrong: set[str]
) -> None:
    result = outcome(candidates, policy, measured, wrong)
    usable = [c for c in candidates if allowed(c, policy, wrong)]
    if policy.pin is not None:
        pinned = [c for c in candidates if policy.pin in (c.name, c.qualified_name)]
        if len(pinned) != 1:
            assert isinstance(result, tuple)
            assert result[0] is (ConfigError if pinned else UnknownNameError)
            return
        usable = [c for c in pinned if c in usable]
    # Narrow down rule by rule; what the selection does in one sort.
    best = usable
    is_met = False
    for glob in policy.prefer:
        if not is_met and any(meant(glob, c) for c in usable):
            best, is_met = [c for c in usable if meant(glob, c)], True
    seconds = measured.seconds if measured is not None else {}
    timed = [c for c in best if c.qualified_name in seconds]
    if timed:
        fastest = min(seconds[c.qualified_name] for c in timed)
        best = [c for c in timed if seconds[c.qualified_name] == fastest]
    elif any(proven(c) for c in best):
        best = [c for c in best if proven(c)]
    best = [c for c in best if c.score == max(c.score for c in best)]
    best.sort(key=lambda c: (c.provider, c.name))
    if not best or (policy.strict and policy.prefer and not is_met):
        assert isinstance(result, tuple)
        assert result[0] is NoCandidateError
    elif policy.strict and len(best) > 1:
        # A tied one that a gate would refuse still ties: only the winner is examined.
        assert isinstance(result, tuple)
        assert "strict=True requires" in result[1]
    elif isinstance(result, tuple):
        assert policy.strict
        assert "strict=True requires" in result[1]
    else:
        assert result.chosen is best[0]
        other_origins = {(c.name, c.origin) for c in candidates if c is not best[0]}
        assert {(r.candidate, r.provider) for r in result.refusals} == other_origins
        assert len(result.refusals) == len(other_origins)
        assert all(refusal.reason for refusal in result.refusals)
        assert result.seconds == {
            c.qualified_name: seconds[c.qualified_name]
            for c in candidates
            if c.qualified_name in seconds
        }


@given(lists_of_candidates, st.data())
def test_a_pin_is_met_or_raises(candidates: list[Candidate], data: st.DataObject) -> None:
    pinned = data.draw(st.sampled_from(candidates))
    policy = Policy(pin=pinned.qualified_name)
    if pinned.judge(REQUEST):
        choice = select(REQUEST, candidates, policy)
        assert choice.chosen is pinned
        assert choice.why == "pinned by the configuration"
        assert len(choice.refusals) == len(candidates) - 1
    else:
        with pytest.raises(NoCandidateError, match="which the configuration pins"):
            select(REQUEST, candidates, policy)


def test_an_unproven_candidate_ranks_after_proven_ones() -> None:
    foreign = candidate("foreign", score=21.0, proven_on=frozenset({"sm_90"}))
    request = replace(REQUEST, capability=Capability("sm_80"))
    choice = select(request, [foreign, candidate("portable", score=0.0)])
    assert choice.chosen.name == "portable"
    assert choice.why == "the others were never measured on this device (sm_80)"
    assert choice.refusals[0].reason == "accepted, but never measured on this device (sm_80)"
    request = replace(REQUEST, capability=Capability("sm_90"))
    assert select(request, [foreign, candidate("portable", score=0.0)]).chosen is foreign


def test_a_chosen_unproven_candidate_is_noted() -> None:
    foreign, portable = candidate("foreign", proven_on=frozenset()), candidate("portable")
    note = f"never measured on this device ({HERE}). Try: interposer verify, then interposer tune"
    for policy in (Policy(pin="foreign"), Policy(prefer=("foreign",))):
        choice = select(REQUEST, [portable, foreign], policy)
        assert choice.chosen is foreign
        assert choice.notes == (note,)
    assert select(REQUEST, [foreign]).notes == (note,)
    # A figure is a proof: of this host, or of such a device by whoever ships a table.
    measured = Measured({"acme/foreign": 1e-6, "acme/portable": 2e-6}, TABLE)
    choice = select(REQUEST, [portable, foreign], measured=measured)
    assert choice.chosen is foreign
    assert choice.notes == ()


def test_highest_score_wins_and_the_outranked_keep_their_scores() -> None:
    choice = select(REQUEST, [candidate("slow", score=0.0), candidate("fast", score=20.0)])
    assert choice.chosen.name == "fast"
    assert choice.why == "highest score (20)"
    assert str(choice.refusals[0]) == "slow (acme 1.0): accepted, but outranked (score 0 < 20)"


def test_the_reason_names_the_only_accepted_candidate() -> None:
    choice = select(REQUEST, [candidate("slow", score=0.0), candidate("fast", refusal="no avx2")])
    assert choice.chosen.name == "slow"
    assert choice.why == "the only one accepted"
    assert [str(refusal) for refusal in choice.refusals] == ["fast (acme 1.0): no avx2"]


@pytest.mark.parametrize(
    ("rivals", "winner"),
    [((("z", "acme"), ("a", "zeta")), "acme/z"), ((("b", "acme"), ("a", "acme")), "acme/a")],
)
def test_a_tie_is_decided_by_provider_then_name_and_explained(
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


# Pins


@pytest.mark.parametrize("pin", ["slow", "acme/slow"])
def test_a_pin_by_name_or_by_provider_and_name(pin: str) -> None:
    candidates = [candidate("slow", score=0.0), candidate("fast", score=20.0)]
    choice = select(REQUEST, candidates, Policy(pin))
    assert choice.chosen.name == "slow"
    assert choice.refusals[0].reason == "accepted, but slow is pinned"


def test_an_ambiguous_pin_raises_and_offers_the_qualified_names() -> None:
    candidates = [candidate("fast", "zeta"), candidate("fast", "acme")]
    with pytest.raises(ConfigError, match="Try: 'acme/fast' or 'zeta/fast'"):
        select(REQUEST, candidates, Policy("fast"))
    assert select(REQUEST, candidates, Policy("zeta/fast")).chosen.provider == "zeta"


def test_a_pinned_candidate_that_refuses_raises_with_its_own_refusal_only() -> None:
    candidates = [candidate("fast", refusal="no avx2"), candidate("odd", refusal="odd size")]
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, [*candidates, candidate("slow")], Policy("fast"))
    assert [str(refusal) for refusal in caught.value.refusals] == ["fast (acme 1.0): no avx2"]
    assert str(caught.value).startswith("No 'fast' for kernel 'linear'")
    assert caught.value.action == "remove the pin; accepted here: 'slow'"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy("fast", forbid=frozenset({"acme/*"})), "forbidden by the configuration ('acme/*')"),
        (Policy("fast", require=frozenset({"traceable"})), "does not promise traceable"),
    ],
)
def test_a_pin_on_an_excluded_candidate_raises_with_that_reason(
    policy: Policy, reason: str
) -> None:
    with pytest.raises(NoCandidateError, match="which the configuration pins") as caught:
        select(REQUEST, [candidate("fast"), candidate("slow", "zeta")], policy)
    assert [refusal.reason for refusal in caught.value.refusals] == [reason]


def test_an_unknown_pin_lists_the_known_nearest_first() -> None:
    candidates = [candidate("linear_tiled"), candidate("linear_packed")]
    with pytest.raises(UnknownNameError) as caught:
        select(REQUEST, candidates, Policy("linear_pakced"))
    assert str(caught.value) == (
        "Unknown kernel 'linear_pakced' for 'linear'. "
        "Known, nearest first: 'linear_packed', 'linear_tiled'."
    )


def test_a_glob_as_a_pin_gets_a_hint() -> None:
    with pytest.raises(UnknownNameError) as caught:
        select(REQUEST, [candidate("linear_tiled")], Policy("linear_*"))
    assert str(caught.value).endswith(
        "Known, nearest first: 'linear_tiled'.\n"
        "A pin names one candidate. Try: Rule(prefer=['linear_*'])"
    )


# Preferences


def test_the_first_met_preference_precedes_every_score() -> None:
    candidates = [
        candidate("fast", score=90.0),
        candidate("one", "zeta"),
        candidate("two", "beta", refusal="odd size"),
        candidate("slow", "zeta", score=0.0),
    ]
    choice = select(REQUEST, candidates, Policy(prefer=("beta/*", "gamma/*", "slow", "one")))
    assert choice.chosen.name == "slow"
    assert choice.why == "preferred by the configuration"
    assert choice.notes == (
        "preferred, but refused: 'beta/*' (two: odd size)",
        "preferred, but no candidate matches: 'gamma/*'",
    )
    assert [str(refusal) for refusal in choice.refusals] == [
        "one (zeta 1.0): accepted, but slow is preferred",
        "fast (acme 1.0): accepted, but slow is preferred",
        "two (beta 1.0): odd size",
    ]


def test_among_equally_preferred_the_next_rule_decides_and_is_named() -> None:
    candidates = [candidate("slow", score=0.0), candidate("fast"), candidate("best", "zeta", 20.0)]
    choice = select(REQUEST, candidates, Policy(prefer=("acme/*",)))
    assert choice.chosen.name == "fast"
    assert choice.why == "preferred by the configuration, then highest score (10)"
    assert {r.candidate: r.reason for r in choice.refusals} == {
        "slow": "accepted, but outranked (score 0 < 10)",
        "best": "accepted, but fast is preferred",
    }
    assert choice.notes == ()


def test_an_unmet_preference_falls_through_and_is_noted() -> None:
    choice = select(REQUEST, [candidate("fast")], Policy(prefer=("absent",)))
    assert choice.chosen.name == "fast"
    assert choice.why == "the only one accepted"
    assert choice.notes == ("preferred, but no candidate matches: 'absent'",)


def test_a_preference_that_the_policy_itself_forbids_names_the_rule() -> None:
    policy = Policy(prefer=("zeta/*",), forbid=frozenset({"zeta/s*", "other"}))
    choice = select(REQUEST, [candidate("fast"), candidate("slow", "zeta")], policy)
    assert choice.notes == (
        "preferred, but refused: 'zeta/*' (slow: forbidden by the configuration ('zeta/s*'))",
    )


def test_an_unmet_preference_raises_if_the_policy_is_strict() -> None:
    candidates = [candidate("fast", refusal="no avx2"), candidate("slow")]
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, candidates, Policy(prefer=("fast", "zeta/*"), strict=True))
    assert str(caught.value) == (
        "No 'fast' or 'zeta/*' for kernel 'linear' [bfloat16 bare in_features=64], "
        "which the configuration strictly prefers.\n"
        "  fast (acme 1.0): no avx2\n"
        "Try: strict=False, or prefer another; accepted here: 'slow'"
    )


# What is forbidden or required


def test_a_forbidden_candidate_is_refused_without_judgement() -> None:
    choice = select(
        REQUEST, [candidate("slow", "zeta"), untouchable("fast")], Policy(forbid=frozenset({"f*"}))
    )
    assert choice.chosen.name == "slow"
    assert [r.reason for r in choice.refusals] == ["forbidden by the configuration ('f*')"]


def test_a_candidate_without_a_required_property_is_refused() -> None:
    safe = candidate("safe", score=0.0, properties=REQUIRABLE)
    half = candidate("half", properties=frozenset({"deterministic"}))
    policy = Policy(require=frozenset({"graph_safe", "batch_invariant", "deterministic"}))
    choice = select(REQUEST, [half, safe], policy)
    assert choice.chosen is safe
    assert [r.reason for r in choice.refusals] == ["does not promise batch_invariant, graph_safe"]


def test_an_error_says_that_the_policy_excludes_every_candidate() -> None:
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, [candidate("fast")], Policy(forbid=frozenset({"*"})))
    assert caught.value.refusals[0].reason == "forbidden by the configuration ('*')"
    assert caught.value.action == "forbid or require less in the configuration"


# Figures


def test_the_fastest_measured_precedes_scores_and_unmeasured_candidates() -> None:
    candidates = [
        candidate("unknown", score=90.0),
        candidate("a", score=20.0),
        candidate("b", score=0.0),
    ]
    measured = Measured({"acme/a": 2.5e-5, "acme/b": 1.25e-5, "acme/gone": 1e-9}, TABLE)
    choice = select(REQUEST, candidates, measured=measured)
    assert choice.chosen.name == "b"
    assert choice.why == "fastest in the table 'bare' (12.5 us)"
    assert choice.seconds == {"acme/a": 2.5e-5, "acme/b": 1.25e-5}
    assert [r.reason for r in choice.refusals] == [
        "accepted, but slower (25 us > 12.5 us)",
        "accepted, but has no measurement, and b has one",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.0, "2 s"),
        (0.5, "500 ms"),
        (1.5e-3, "1.5 ms"),
        (1e-6, "1 us"),
        (5e-9, "5 ns"),
        (0, "0 ns"),
    ],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    measured = Measured({"acme/a": seconds, "acme/b": 3.0}, TABLE)
    choice = select(REQUEST, [candidate("a"), candidate("b")], measured=measured)
    assert choice.why == f"fastest in the table 'bare' ({text})"


def test_a_preference_precedes_time_which_decides_among_the_preferred() -> None:
    candidates = [candidate("a", "zeta"), candidate("b", "zeta"), candidate("c", score=20.0)]
    measured = Measured({"zeta/a": 3e-6, "zeta/b": 2e-6, "acme/c": 1e-6}, TABLE)
    choice = select(REQUEST, candidates, Policy(prefer=("zeta/*",)), measured=measured)
    assert choice.chosen.name == "b"
    assert choice.why == "preferred by the configuration, then fastest in the table 'bare' (2 us)"


def test_equal_times_are_decided_by_the_score() -> None:
    measured = Measured({"acme/a": 1e-6, "acme/b": 1e-6}, TABLE)
    choice = select(REQUEST, [candidate("a"), candidate("b", score=20.0)], measured=measured)
    assert choice.why == "highest score (20) of the equally fast ones in the table 'bare'"


def test_candidates_within_the_spread_of_the_fastest_are_equally_fast() -> None:
    seconds = {"acme/a": 1.0e-6, "acme/b": 1.1e-6, "acme/c": 1.3e-6}
    measured = Measured(seconds, TABLE, upper={"acme/a": 1.2e-6, "acme/b": 9.0e-6})
    candidates = [candidate("a"), candidate("b", score=20.0), candidate("c", score=90.0)]
    choice = select(REQUEST, candidates, measured=measured)
    assert choice.chosen.name == "b"
    assert choice.why == "highest score (20) of the equally fast ones in the table 'bare'"
    assert [r.reason for r in choice.refusals] == [
        "accepted, equally fast within the spread (1 us and 1.1 us), but outranked (score 10 < 20)",
        "accepted, but slower (1.3 us > 1.1 us)",
    ]
    assert choice.notes == ()


def test_scattered_measurements_are_noted() -> None:
    seconds = {"acme/a": 1.0e-6, "acme/b": 2.0e-6}
    measured = Measured(seconds, "the measurements of this host", upper={"acme/a": 2.5e-6})
    choice = select(REQUEST, [candidate("a"), candidate("b", score=20.0)], measured=measured)
    assert choice.chosen.name == "b"
    assert choice.notes == (
        "the measurements of this host are scattered: acme/a took 1 us, but more than 2.5 us in a "
        "quarter of the runs, and times below that count as equally fast. Try: interposer tune, "
        "while the machine does nothing else",
    )


# Strict


def test_a_tie_raises_if_the_policy_is_strict() -> None:
    candidates = [candidate("fast", "zeta"), candidate("fast"), candidate("slow", score=0.0)]
    with pytest.raises(NoCandidateError) as caught:
        select(REQUEST, candidates, Policy(strict=True))
    assert str(caught.value) == (
        "No single best candidate for kernel 'linear' [bfloat16 bare in_features=64], "
        "which strict=True requires.\n"
        "  fast (acme 1.0): ties at score 10\n"
        "  fast (zeta 1.0): ties at score 10\n"
        "Try: pin or prefer 'acme/fast' or 'zeta/fast'"
    )


@pytest.mark.parametrize("wish", [{"pin": "zeta/fast"}, {"prefer": ("zeta/*",)}])
def test_the_suggested_remedy_for_a_tie_works(wish: dict[str, Any]) -> None:
    candidates = [candidate("fast", "zeta"), candidate("fast")]
    assert select(REQUEST, candidates, Policy(**wish, strict=True)).chosen.provider == "zeta"


def test_a_measured_winner_is_no_tie() -> None:
    measured = Measured({"acme/a": 2e-6, "acme/b": 1e-6}, TABLE)
    choice = select(
        REQUEST, [candidate("a"), candidate("b")], Policy(strict=True), measured=measured
    )
    assert choice.chosen.name == "b"


# Gates


def test_gates_check_winners_in_order_until_one_passes_all() -> None:
    checked: list[str] = []

    def first(_: Request, c: Candidate) -> Verdict:
        checked.append(c.name)
        return Verdict.accept() if c.name == "b" else Verdict.refuse("wrong numbers", "trace")

    def second(_: Request, c: Candidate) -> Verdict:
        checked.append(f"{c.name} again")
        return Verdict.accept()

    candidates = [
        candidate(name, score=score) for name, score in zip("abc", (3, 2, 1), strict=True)
    ]
    choice = select(REQUEST, candidates, gates=(first, second))
    assert checked == ["a", "b", "b again"]
    assert choice.chosen.name == "b"
    assert [(r.candidate, r.reason, r.traceback) for r in choice.refusals] == [
        ("c", "accepted, but outranked (score 1 < 2)", ""),
        ("a", "wrong numbers", "trace"),
    ]


def test_a_pinned_candidate_that_a_gate_refuses_raises_without_trying_others() -> None:
    with pytest.raises(NoCandidateError, match="which the configuration pins") as caught:
        select(
            REQUEST,
            [candidate("a"), candidate("b")],
            Policy("a"),
            gates=refusing("acme/a", "acme/b"),
        )
    assert [str(r) for r in caught.value.refusals] == ["a (acme 1.0): wrong numbers"]
    assert caught.value.action == "remove the pin; accepted here: 'b'"


def test_if_gates_refuse_all_candidates_the_error_has_every_reason() -> None:
    with pytest.raises(NoCandidateError) as caught:
        select(
            REQUEST,
            [candidate("a"), candidate("b", refusal="odd size")],
            gates=refusing("acme/a"),
        )
    assert [r.reason for r in caught.value.refusals] == ["wrong numbers", "odd size"]


def emulating(name: str = "reference") -> Candidate:
    record = OpEntry("linear", "acme.ops:linear", emulation="dequantizes first")
    return Candidate(name, "acme", "1.0", 0.0, record, lambda _: Verdict.accept())


def test_an_exception_in_a_gate_refuses_with_its_traceback() -> None:
    def gate(_: Request, c: Candidate) -> Verdict:
        if c.name == "a":
            raise OSError("its library is broken")
        return Verdict.accept()

    choice = select(REQUEST, [candidate("a"), candidate("b")], gates=(gate,))
    assert choice.chosen.name == "b"
    (refusal,) = choice.refusals
    assert refusal.reason == "raised OSError('its library is broken')"
    assert "Traceback" in refusal.traceback


def test_unusable_measurements_are_noted() -> None:
    choice = select(REQUEST, [candidate("a")], measured="the table cannot be used: torch was 1")
    assert choice.notes == ("the table cannot be used: torch was 1",)


def test_a_chosen_emulation_is_noted() -> None:
    assert select(REQUEST, [emulating(), candidate("a")]).notes == ()
    choice = select(REQUEST, [emulating(), candidate("a", refusal="odd size")])
    assert choice.chosen.name == "reference"
    assert choice.notes == ("an emulation: it dequantizes first",)
    assert select(REQUEST, [emulating()], Policy("reference")).notes == choice.notes
    preferred = select(REQUEST, [emulating()], Policy(prefer=("b",)))
    assert preferred.notes == ("preferred, but no candidate matches: 'b'", *choice.notes)


def test_a_choice_says_whether_the_user_requested_the_candidate() -> None:
    two = [candidate("a"), candidate("b")]
    assert not select(REQUEST, two).wished
    assert select(REQUEST, two, Policy("b")).wished
    assert select(REQUEST, two, Policy(prefer=("b",))).wished
    assert select(REQUEST, two, Policy(default="b")).wished
    assert not select(REQUEST, two, Policy(prefer=("c",))).wished


def test_an_emulation_may_be_refused() -> None:
    policy = Policy(emulation=False)
    choice = select(REQUEST, [emulating(), candidate("a")], policy)
    reason = "an emulation, which the configuration refuses: it dequantizes first"
    assert [(r.candidate, r.reason) for r in choice.refusals] == [("reference", reason)]
    for refusing in (policy, replace(policy, pin="reference")):
        with pytest.raises(NoCandidateError) as caught:
            select(REQUEST, [emulating(), candidate("a", refusal="odd size")], refusing)
        assert reason in [r.reason for r in caught.value.refusals]


def test_the_reason_of_the_chosen_candidates_acceptance_is_noted() -> None:
    telling = replace(candidate("a"), judge=lambda _: Verdict.accept("up to 16 rows"))
    assert select(REQUEST, [telling, candidate("b", score=1.0)]).notes == ("up to 16 rows",)
    rough = replace(telling, record=Kernel("linear", "a", "a.b:c", extra_roundings=3))
    roughly = "may be off by 3 roundings more than the op allows"
    assert select(REQUEST, [rough]).notes == (roughly, "up to 16 rows")
    platform = Request("platform", "", "")
    assert select(platform, [telling]).notes == ()
