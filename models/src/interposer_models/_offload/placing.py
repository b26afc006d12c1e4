"""The place of each block's weights, decided from sizes and a budget; plain data with reasons.

Every step reads every block once, in order. What is used least recently is then what is wanted
next, so that a cache which forgets by that rule holds nothing that it will need. A fixed part of
the blocks is resident instead, and the others pass through buffers: no policy reads less in a
cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from interposer.errors import ConfigError

Where = Literal["resident", "streamed", "mapped"]
Source = Literal["disk", "host"]

_COMES = {"disk": "read from the disk", "host": "copied from host memory"}
_DISK_BUFFERS, _HOST_BUFFERS = 3, 2


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The bytes of a block's weights.

    Attributes:
        num_bytes: that every step reads.
        expert_bytes: of experts, of which a step reads those that its tokens are routed to.
    """

    name: str
    num_bytes: int
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a block's weights, that of its experts, and the reason."""

    size: BlockSize
    where: Where
    experts: Where
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The places of a model's weights; its notes are for people.

    Attributes:
        source: where those come from that are not resident.
        budget_bytes: that resident weights and buffers may take.
        other_bytes: of weights outside of blocks, which are resident.
        num_buffers: that streamed blocks take turns in.
        places: of all blocks, in order.
        is_automatic: nobody asked for it.
    """

    source: Source
    budget_bytes: int
    other_bytes: int
    num_buffers: int
    places: tuple[BlockPlace, ...]
    is_automatic: bool = False

    @property
    def streamed(self) -> tuple[int, ...]:
        """The numbers of the blocks that are streamed."""
        return tuple(i for i, place in enumerate(self.places) if place.where == "streamed")

    @property
    def offloads(self) -> bool:
        """True if anything is not resident."""
        return any(at != "resident" for place in self.places for at in (place.where, place.experts))

    def notes(self) -> list[str]:
        """Return what lies where and why: a line for all, and one for blocks that are alike."""
        total = self.other_bytes + sum(_all_bytes(place.size) for place in self.places)
        asked = "as nobody said otherwise" if self.is_automatic else "as asked for"
        lines = [
            f"offload: the weights take {_size(total)}, {_size(self.budget_bytes)} of it may be "
            f"resident, {asked}; outside of blocks {_size(self.other_bytes)}, resident"
        ]
        alike: dict[tuple[str, str, str], list[int]] = {}
        for number, place in enumerate(self.places):
            key = place.where, place.experts if place.size.expert_bytes else "", place.reason
            alike.setdefault(key, []).append(number)
        for (where, experts, reason), numbers in alike.items():
            held = sum(self.places[number].size.num_bytes for number in numbers)
            text = f"offload: blocks {_ranges(numbers)} {where}, {_size(held)}"
            if experts:
                held = sum(self.places[number].size.expert_bytes for number in numbers)
                text += f", and {_size(held)} of experts {experts}"
            lines.append(f"{text}: {reason}")
        return lines


def placed(
    sizes: Sequence[BlockSize],
    other_bytes: int,
    budget_bytes: int,
    source: Source,
    *,
    can_map: bool,
    is_automatic: bool = False,
) -> OffloadPlan:
    """Return where blocks lie so that no more than the budget is resident.

    Args:
        can_map: experts may stay where they are and be read in place.
    Raises: ConfigError: the buffers and what is outside of blocks exceed the budget.
    """
    own = [size.num_bytes + (0 if can_map else size.expert_bytes) for size in sizes]
    mapped = [size.expert_bytes if can_map else 0 for size in sizes]
    everything = range(len(sizes))
    buffers = 0
    resident = set(everything)
    if other_bytes + sum(own) > budget_bytes:
        buffers = min(_DISK_BUFFERS if source == "disk" else _HOST_BUFFERS, len(sizes))
        least = other_bytes + buffers * max(own)
        if least > budget_bytes:
            raise ConfigError(
                f"{_size(budget_bytes)} may be resident, but what is outside of blocks takes "
                f"{_size(other_bytes)} and {buffers} buffers {_size(buffers * max(own))}. "
                f"Try: a budget of {least} bytes at least"
            )
        resident = _spread(own, budget_bytes - least)
    room = budget_bytes - other_bytes - sum(own[i] for i in resident)
    room -= buffers * max(own, default=0)
    # A host's own cache of the disk keeps the experts that are used; a device has none.
    kept = _spread(mapped, room if source == "host" else 0)
    if sum(mapped) <= room:
        kept = set(everything)
    places = []
    for i, size in enumerate(sizes):
        where: Where = "resident" if i in resident else "streamed"
        experts: Where = where
        if mapped[i]:
            experts = "resident" if i in kept else "mapped"
        places.append(BlockPlace(size, where, experts, _reason(where, experts, source)))
    return OffloadPlan(source, budget_bytes, other_bytes, buffers, tuple(places), is_automatic)


def _spread(sizes: Sequence[int], room_bytes: int) -> set[int]:
    """Return the most blocks that fit, evenly between the others.

    While one of them computes, what comes behind it is on its way.
    """
    count = len(sizes)
    for kept in range(count, 0, -1):
        chosen = {(2 * i + 1) * count // (2 * kept) for i in range(kept)}
        if sum(sizes[i] for i in chosen) <= room_bytes:
            return chosen
    return set()


def _reason(where: Where, experts: Where, source: Source) -> str:
    comes = _COMES[source]
    if where == "streamed":
        text = f"{comes} in every step while the blocks before compute"
    else:
        text = "fits into the budget"
    if experts == "mapped":
        text += "; of experts only those are read that tokens are routed to"
    return text


def _all_bytes(size: BlockSize) -> int:
    return size.num_bytes + size.expert_bytes


def _ranges(numbers: Iterable[int]) -> str:
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


def _size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
