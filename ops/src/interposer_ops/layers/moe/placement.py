"""Expert parallelism: settings, the placement of experts on ranks, and load balancing.

Dimensions: N ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from interposer.errors import ConfigError

__all__ = ["ExpertParallel", "ExpertPlacement", "balanced_placement", "even_placement"]

# Moving an expert reads its weights again, so the busiest rank must gain at least 5 %.
_MAX_LOAD_RATIO = 0.95
# For each rank; one or two are mostly enough.
_MAX_EXCHANGES = 4


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Settings of expert parallelism, in which each rank holds complete experts.

    Attributes:
        redundant_experts: extra expert slots of each layer, for second copies of its busiest
            experts.
        dispatch_tokens: smallest number of tokens in a step for the all-to-all: each rank takes a
            part of the tokens and sends rows to the ranks of the chosen experts. In smaller steps
            each rank computes its own experts for all tokens, and an all-reduce sums the results.
            None: 1024 if the all-to-all then moves fewer bytes, else never; 0: never.
    Raises: ConfigError: a number is not an integer of at least 0.
    """

    redundant_experts: int = 0
    dispatch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("redundant_experts", "dispatch_tokens"):
            number = getattr(self, name)
            is_int = isinstance(number, int) and not isinstance(number, bool)
            if not (number is None and name == "dispatch_tokens") and not (is_int and number >= 0):
                raise ConfigError(
                    f"{name} of ExpertParallel is {number!r}, must be an integer of at least 0"
                )

    @classmethod
    def of(cls, given: Any) -> ExpertParallel | None:
        """Convert the ``expert_parallel`` argument of ``load`` to settings.

        Returns: None if expert parallelism is off, so that each rank holds a shard of every expert.
        Raises: ConfigError: the argument has another type.
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
    """The experts that each rank holds.

    Attributes:
        num_experts: E, the number of experts that the router knows.
        ranks: for each rank, the ids of its experts in storage order. The rows of an expert on
            several ranks are divided among these ranks.
    Raises: ConfigError: an expert is on no rank, or twice on one rank, or an id is out of range.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        twice = [e for experts in self.ranks for e in set(experts) if experts.count(e) > 1]
        placed = {e for experts in self.ranks for e in experts}
        wrong = [e for e in placed if not 0 <= e < self.num_experts]
        # The first gap is at most len(placed), so that an absurd number takes no time or memory.
        gaps = (e for e in range(min(self.num_experts, len(placed) + 1)) if e not in placed)
        wrong += [gap for gap in [next(gaps, None)] if gap is not None]
        if twice or wrong:
            fault = f"{twice[0]} is twice on a rank" if twice else f"{min(wrong)} has no place"
            raise ConfigError(f"{self} places {self.num_experts} experts, of which {fault}")

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """List the (rank, index on that rank) of every copy of each expert."""
        copies: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.ranks):
            for index, expert in enumerate(experts):
                copies[expert].append((rank, index))
        return tuple(map(tuple, copies))

    def shares(self, loads: Sequence[float]) -> list[float]:
        """Compute the load of each rank; the copies of an expert share the expert's rows evenly.

        Args:
            loads: rows of each expert, ``[E]``.
        """
        copies = [len(places) for places in self.places]
        return [sum(loads[e] / copies[e] for e in experts) for experts in self.ranks]


def even_placement(num_experts: int, num_ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Place experts evenly, for use before any load is known.

    Consecutive experts are on the same rank: a rank then reads one range of a tensor with the
    matrices of all experts. The redundant slots hold second copies of the first experts.

    Raises: ConfigError: there are more ranks than slots, or more redundant slots than copies that
        fit.
    """
    capacities = _rank_capacities(num_experts, num_ranks, redundant)
    experts_by_rank, first = [], 0
    for size in _spread(num_experts, num_ranks):
        experts_by_rank.append([*range(first, first + size)])
        first += size
    builder = _PlacementBuilder(capacities, [0.0] * num_experts, experts_by_rank)
    for number in range(redundant):
        builder.put(number % num_experts)
    return builder.placement(num_experts)


def balanced_placement(loads: Sequence[int], before: ExpertPlacement) -> ExpertPlacement:
    """Rebalance a placement by measured loads, with the same number of expert slots.

    Extra copies go to the experts with most rows per copy. Then experts are placed in the order of
    decreasing load, each on the least loaded rank with a free slot (longest processing time first,
    doi:10.1137/0117039). Then the busiest rank exchanges experts with other ranks as long as that
    lowers the maximum load.

    Args:
        loads: rows of each expert, ``[E]``.
        before: the current placement, with as many experts per rank as ``even_placement`` gives.
    Returns: ``before`` itself if the most loaded rank would gain less than 5 %.
    """
    num_ranks, count = len(before.ranks), before.num_experts
    redundant = sum(map(len, before.ranks)) - count
    copies = [1] * count
    for _ in range(redundant):
        free = [e for e in range(count) if copies[e] < num_ranks]
        # Ties go to the expert with fewer copies, then to the lower id: deterministic on all ranks.
        copies[max(free, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    copy_loads = [load / number for load, number in zip(loads, copies, strict=True)]
    capacities = _rank_capacities(count, num_ranks, redundant)
    builder = _PlacementBuilder(capacities, copy_loads, [[] for _ in before.ranks])
    # Experts with more copies first among equals, as each of their copies needs another rank.
    for expert in sorted(range(count), key=lambda e: (-copy_loads[e], -copies[e], e)):
        for _ in range(copies[expert]):
            builder.put(expert)
    builder.even_out()
    builder.experts_by_rank = [
        [*_keep_slots(*pair)] for pair in zip(before.ranks, builder.experts_by_rank, strict=True)
    ]
    placement = builder.placement(count)
    is_worth_moving = max(placement.shares(loads)) < _MAX_LOAD_RATIO * max(before.shares(loads))
    return placement if is_worth_moving else before


def _rank_capacities(num_experts: int, num_ranks: int, redundant: int) -> list[int]:
    """Return the number of expert slots that each rank has."""
    num_slots = num_experts + redundant
    if num_slots < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks are more than {num_experts} experts and {redundant} redundant ones"
        )
    if redundant > num_experts * (num_ranks - 1):
        raise ConfigError(
            f"redundant_experts is {redundant}, but {num_ranks} ranks can hold "
            f"{num_experts * (num_ranks - 1)} redundant copies of {num_experts} experts at most"
        )
    return _spread(num_slots, num_ranks)


def _spread(count: int, num_ranks: int) -> list[int]:
    """Divide ``count`` into ``num_ranks`` parts that differ by one at most, larger parts first."""
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


class _PlacementBuilder:
    """Assigns expert copies to ranks while keeping the loads of the ranks even.

    Args:
        capacities: expert slots of each rank; capacities differ by one at most.
        copy_loads: rows of one copy of each expert.
        experts_by_rank: experts that are already assigned.
    """

    def __init__(
        self, capacities: list[int], copy_loads: list[float], experts_by_rank: list[list[int]]
    ) -> None:
        self.capacities, self.copy_loads = capacities, copy_loads
        self.experts_by_rank = experts_by_rank
        self.rank_loads = [sum(copy_loads[e] for e in experts) for experts in experts_by_rank]

    def put(self, expert: int) -> None:
        """Add a copy to the least loaded rank that has a free slot and no copy of the expert.

        If every rank with a free slot already has a copy, a full rank without one first hands one
        of its other experts over to a rank with a free slot. Capacities differ by one at most, so
        the full rank always has an expert that the other rank lacks.
        """
        ranks = range(len(self.experts_by_rank))
        without_copy = [r for r in ranks if expert not in self.experts_by_rank[r]]
        eligible = [r for r in without_copy if self._free_slots(r)]
        if not eligible:
            giver = min(without_copy, key=lambda r: (self.rank_loads[r], r))
            taker = next(r for r in ranks if self._free_slots(r))
            moved = next(
                e
                for e in reversed(self.experts_by_rank[giver])
                if e not in self.experts_by_rank[taker]
            )
            self.experts_by_rank[giver].remove(moved)
            self.rank_loads[giver] -= self.copy_loads[moved]
            self._add(moved, taker)
            eligible = [giver]
        least_loaded = min(eligible, key=lambda r: (self.rank_loads[r], -self._free_slots(r), r))
        self._add(expert, least_loaded)

    def even_out(self) -> None:
        """Exchange experts between the busiest rank and others while that lowers the maximum load.

        Greedy placement alone is uneven: near the end only some ranks have free slots, and get the
        last experts even if heavily loaded.
        """
        for _ in range(_MAX_EXCHANGES * len(self.experts_by_rank)):
            ranks = range(len(self.experts_by_rank))
            busiest = max(ranks, key=lambda r: (self.rank_loads[r], -r))
            busiest_experts = set(self.experts_by_rank[busiest])
            exchanges = []
            for rank, experts in enumerate(map(set, self.experts_by_rank)):
                gap = self.rank_loads[busiest] - self.rank_loads[rank]
                # The best exchange moves half of the gap: rank candidates by the distance from that
                # half.
                exchanges += [
                    (abs(gap / 2 - moved_load), rank, out, into)
                    for out in busiest_experts - experts
                    for into in experts - busiest_experts
                    if 0 < (moved_load := self.copy_loads[out] - self.copy_loads[into]) < gap
                ]
            if not exchanges:
                return
            _, rank, *pair = min(exchanges)
            for changed_rank, (out, into) in ((busiest, pair), (rank, pair[::-1])):
                self.experts_by_rank[changed_rank].remove(out)
                self.rank_loads[changed_rank] -= self.copy_loads[out]
                self._add(into, changed_rank)

    def placement(self, num_experts: int) -> ExpertPlacement:
        """Return the current assignment of experts to ranks."""
        return ExpertPlacement(num_experts, tuple(map(tuple, self.experts_by_rank)))

    def _free_slots(self, rank: int) -> int:
        return self.capacities[rank] - len(self.experts_by_rank[rank])

    def _add(self, expert: int, rank: int) -> None:
        self.experts_by_rank[rank].append(expert)
        self.rank_loads[rank] += self.copy_loads[expert]


def _keep_slots(before: Sequence[int], after: Sequence[int]) -> Iterator[int]:
    """Yield a rank's new experts in slot order; an expert that stays keeps the slot.

    Only the slots of experts that move are read again.
    """
    new = iter([expert for expert in after if expert not in before])
    for expert in before:
        occupant = expert if expert in after else next(new, None)
        if occupant is not None:
            yield occupant
    yield from new
