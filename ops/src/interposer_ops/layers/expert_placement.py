"""The places of a layer's experts on ranks: as settings, as data, and as they follow the load.

Dimensions: N ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from interposer.errors import ConfigError

__all__ = ["ExpertParallel", "ExpertPlacement", "balanced_placement", "even_placement"]

# Experts move for a gain of a twentieth at least, since what moves is read again.
_WORTH = 0.95
# For each rank; one or two are mostly enough.
_MOST_EXCHANGES = 4


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The manner in which experts are placed whole on ranks.

    Attributes:
        redundant_experts: further places of each layer, for second copies of its busiest experts.
        dispatch_tokens: from how many tokens of a step on each rank takes a share of them and sends
            rows to the ranks of their experts; with fewer tokens each rank computes its own experts
            for all of them, and results are added up. None: 512 where that moves fewer bytes, else
            never; 0 never.
    Raises: ConfigError: a number is no integer of at least 0.
    """

    redundant_experts: int = 0
    dispatch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("redundant_experts", "dispatch_tokens"):
            number = getattr(self, name)
            whole = isinstance(number, int) and not isinstance(number, bool)
            if not (number is None and name == "dispatch_tokens") and not (whole and number >= 0):
                raise ConfigError(
                    f"{name} of ExpertParallel is {number!r}, must be an integer of at least 0"
                )

    @classmethod
    def of(cls, given: Any) -> ExpertParallel | None:
        """Return the settings that ``load`` was given; None where each rank has parts of experts.

        Raises: ConfigError: they are of another type.
        """
        if isinstance(given, bool):
            return cls() if given else None
        if given is None or isinstance(given, cls):
            return given
        raise ConfigError(
            f"expert_parallel is {given!r}, must be True, False or ExpertParallel(...)"
        )


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of each rank.

    Attributes:
        num_experts: E, as the router counts them.
        ranks: the experts of each rank by their numbers, in the order in which it holds them. An
            expert of several ranks gets a share of its rows on each.
    Raises: ConfigError: an expert is nowhere, or twice on one rank, or there is no such expert.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        twice = [e for held in self.ranks for e in set(held) if held.count(e) > 1]
        missing = {*range(self.num_experts)}.symmetric_difference(
            e for held in self.ranks for e in held
        )
        if twice or missing:
            wrong = f"{twice[0]} is twice on a rank" if twice else f"{min(missing)} has no place"
            raise ConfigError(f"{self} places {self.num_experts} experts, of which {wrong}")

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The rank of each copy of each expert, and its number among what that rank holds."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, held in enumerate(self.ranks):
            for number, expert in enumerate(held):
                found[expert].append((rank, number))
        return tuple(map(tuple, found))

    def shares(self, loads: Sequence[float]) -> list[float]:
        """Return the rows of each rank, where copies of an expert share its rows evenly.

        Args:
            loads: rows of each expert.
        """
        copies = [len(places) for places in self.places]
        return [sum(loads[e] / copies[e] for e in held) for held in self.ranks]


def even_placement(num_experts: int, num_ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Return a placement for experts of which no load is known.

    Neighbours lie next to each other, so that a rank reads one range of a tensor that holds all of
    them. Second copies are those of the first experts.

    Raises: ConfigError: a rank would have no expert, or the same one twice.
    """
    rooms = _rooms(num_experts, num_ranks, redundant)
    held, first = [], 0
    for size in _spread(num_experts, num_ranks):
        held.append([*range(first, first + size)])
        first += size
    fill = _Fill(rooms, [0.0] * num_experts, held)
    for number in range(redundant):
        fill.put(number % num_experts)
    return fill.placement(num_experts)


def balanced_placement(loads: Sequence[int], before: ExpertPlacement) -> ExpertPlacement:
    """Return a placement with as many copies of experts, whose most loaded rank has less to do.

    The busiest experts per copy get the further copies; then experts go, the busiest first, each to
    the ranks that have least to do and room for it (the rule of the longest processing time,
    doi:10.1137/0117039), and the busiest rank exchanges experts with others while it gains by that.
    Where all of it is no gain of a twentieth, all experts stay.

    Args:
        loads: rows of each expert, ``[E]``.
        before: with as many experts on each rank as ``even_placement`` gives it.
    """
    num_ranks, count = len(before.ranks), before.num_experts
    redundant = sum(map(len, before.ranks)) - count
    copies = [1] * count
    for _ in range(redundant):
        free = [e for e in range(count) if copies[e] < num_ranks]
        copies[max(free, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    shares = [load / number for load, number in zip(loads, copies, strict=True)]
    fill = _Fill(_rooms(count, num_ranks, redundant), shares, [[] for _ in before.ranks])
    for expert in sorted(range(count), key=lambda e: (-shares[e], -copies[e], e)):
        for _ in range(copies[expert]):
            fill.put(expert)
    fill.even_out()
    fill.held = [[*_in_place(*pair)] for pair in zip(before.ranks, fill.held, strict=True)]
    found = fill.placement(count)
    return found if max(found.shares(loads)) < _WORTH * max(before.shares(loads)) else before


def _rooms(num_experts: int, num_ranks: int, redundant: int) -> list[int]:
    """Return how many experts each rank holds."""
    places = num_experts + redundant
    if places < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks are more than {num_experts} experts and {redundant} redundant ones"
        )
    if redundant > num_experts * (num_ranks - 1):
        raise ConfigError(
            f"redundant_experts is {redundant}, and {num_ranks} ranks have room for "
            f"{num_experts * (num_ranks - 1)} further copies of {num_experts} experts"
        )
    return _spread(places, num_ranks)


def _spread(count: int, num_ranks: int) -> list[int]:
    """Return equal shares, the first ones larger by one; of a larger count none is smaller."""
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


class _Fill:
    """Ranks while experts are put on them.

    Args:
        rooms: how many experts each rank is to hold; they differ by one at most.
        shares: rows of a copy of each expert.
        held: what ranks have already.
    """

    def __init__(self, rooms: list[int], shares: list[float], held: list[list[int]]) -> None:
        self.rooms, self.shares, self.held = rooms, shares, held
        self.todo = [sum(shares[e] for e in own) for own in held]

    def put(self, expert: int) -> None:
        """Add a copy to the rank with least to do of those that have room and not this expert.

        Where all ranks with room have it, one of them takes another expert from a rank that has
        not, which takes the copy. Rooms differ by one at most, so that there is such an expert.
        """
        ranks = range(len(self.held))
        without = [r for r in ranks if expert not in self.held[r]]
        free = [r for r in without if self._room(r)]
        if not free:
            giver = min(without, key=lambda r: (self.todo[r], r))
            taker = next(r for r in ranks if self._room(r))
            given = next(e for e in reversed(self.held[giver]) if e not in self.held[taker])
            self.held[giver].remove(given)
            self.todo[giver] -= self.shares[given]
            self._add(given, taker)
            free = [giver]
        self._add(expert, min(free, key=lambda r: (self.todo[r], -self._room(r), r)))

    def even_out(self) -> None:
        """Let the busiest rank exchange an expert with another one, as long as both then have less.

        Ranks that are full as equal numbers want it would else keep what they got last.
        """
        for _ in range(_MOST_EXCHANGES * len(self.held)):
            busy = max(range(len(self.held)), key=lambda r: (self.todo[r], -r))
            mine = set(self.held[busy])
            found = []
            for rank, theirs in enumerate(map(set, self.held)):
                gap = self.todo[busy] - self.todo[rank]
                found += [
                    (abs(gap / 2 - less), rank, out, into)
                    for out in mine - theirs
                    for into in theirs - mine
                    if 0 < (less := self.shares[out] - self.shares[into]) < gap
                ]
            if not found:
                return
            _, rank, *pair = min(found)
            for place, (out, into) in ((busy, pair), (rank, pair[::-1])):
                self.held[place].remove(out)
                self.todo[place] -= self.shares[out]
                self._add(into, place)

    def placement(self, num_experts: int) -> ExpertPlacement:
        """Return what the ranks hold now."""
        return ExpertPlacement(num_experts, tuple(map(tuple, self.held)))

    def _room(self, rank: int) -> int:
        return self.rooms[rank] - len(self.held[rank])

    def _add(self, expert: int, rank: int) -> None:
        self.held[rank].append(expert)
        self.todo[rank] += self.shares[expert]


def _in_place(before: Sequence[int], after: Sequence[int]) -> Iterator[int]:
    """Yield the experts of a rank, those that stay where they were."""
    new = iter([expert for expert in after if expert not in before])
    for expert in before:
        if (there := expert if expert in after else next(new, None)) is not None:
            yield there
    yield from new
