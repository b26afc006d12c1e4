"""Placements of experts on ranks: every expert has a place, and the busiest rank no more to do."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from interposer.errors import ConfigError
from interposer_ops.layers.moe.placement import (
    ExpertParallel,
    ExpertPlacement,
    balanced_placement,
    even_placement,
)


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Return an even placement of any shape that there is room for."""
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    redundant = draw(st.integers(0, min(12, experts * (ranks - 1))))
    assume(experts + redundant >= ranks)
    return even_placement(experts, ranks, redundant)


def check(placement: ExpertPlacement) -> None:
    """Hold that each expert has a place, and that no rank has one twice."""
    assert all(len(set(experts)) == len(experts) for experts in placement.ranks)
    assert {e for experts in placement.ranks for e in experts} == {*range(placement.num_experts)}
    for expert, places in enumerate(placement.places):
        assert places
        assert all(placement.ranks[rank][number] == expert for rank, number in places)


@given(placements())
def test_even_placements_give_ranks_equal_numbers_of_experts(placement: ExpertPlacement) -> None:
    check(placement)
    sizes = [len(experts) for experts in placement.ranks]
    assert max(sizes) - min(sizes) <= 1
    copies = [len(places) for places in placement.places]
    assert max(copies) - min(copies) <= 1


@given(placements(), st.data())
@example(even_placement(5, 3, 4), None)
def test_balancing_never_raises_the_maximum_load(
    placement: ExpertPlacement, data: st.DataObject | None
) -> None:
    numbers = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    count = placement.num_experts
    drawn = st.lists(numbers, min_size=count, max_size=count)
    loads = [9, 0, 0, 0, 1] if data is None else data.draw(drawn)
    balanced = balanced_placement(loads, placement)
    check(balanced)
    # As much memory on each rank as before, so that weights fit in their places.
    assert [len(experts) for experts in balanced.ranks] == [
        len(experts) for experts in placement.ranks
    ]
    assert sum(balanced.shares(loads)) == pytest.approx(sum(loads))
    assert max(balanced.shares(loads)) <= max(placement.shares(loads))
    # What stays on a rank stays in its place there, and a second look finds nothing to gain.
    for before, after in zip(placement.ranks, balanced.ranks, strict=True):
        remaining = [expert for expert in before if expert in after]
        assert remaining == [e for e, occupant in zip(before, after, strict=True) if e == occupant]
    assert balanced_placement(loads, balanced) == balanced


def test_the_busiest_experts_get_the_extra_copies() -> None:
    before = even_placement(6, 3, 3)
    balanced = balanced_placement([900, 10, 300, 10, 10, 10], before)
    assert [len(places) for places in balanced.places] == [3, 1, 2, 1, 1, 1]
    assert max(balanced.shares([900, 10, 300, 10, 10, 10])) <= 470


def test_ranks_with_unequal_capacity_exchange_experts() -> None:
    before = even_placement(5, 2)
    balanced = balanced_placement([54, 9, 15, 57, 9], before)
    # By the longest one first, the rank of three places keeps 78 rows and the other one 66.
    assert max(balanced.shares([54, 9, 15, 57, 9])) == 72


def test_without_known_loads_ranks_hold_consecutive_experts() -> None:
    assert even_placement(5, 2).ranks == ((0, 1, 2), (3, 4))
    assert even_placement(5, 2, 1).ranks == ((0, 1, 2), (3, 4, 0))


def test_impossible_placements_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 ranks are more than 5 experts"):
        even_placement(5, 8)
    with pytest.raises(ConfigError, match="can hold 5 redundant copies"):
        even_placement(5, 2, 6)
    with pytest.raises(ConfigError, match="2 has no place"):
        ExpertPlacement(3, ((0,), (1,)))
    with pytest.raises(ConfigError, match="1 has no place"):
        ExpertPlacement(2**60, ((0,),))  # without a set of that many numbers
    with pytest.raises(ConfigError, match="3 has no place"):
        ExpertPlacement(1, ((0, 3),))
    with pytest.raises(ConfigError, match="0 is twice on a rank"):
        ExpertPlacement(2, ((0, 0), (1,)))
    with pytest.raises(ConfigError, match="redundant_experts of ExpertParallel is -1"):
        ExpertParallel(redundant_experts=-1)
    with pytest.raises(ConfigError, match="dispatch_tokens of ExpertParallel is True"):
        ExpertParallel(dispatch_tokens=True)
    with pytest.raises(ConfigError, match="expert_parallel is 'yes'"):
        ExpertParallel.of("yes")
