"""Decides from sizes and a budget where the weights of each block lie; plain data with reasons.

Every step reads every block once, in order. A cache with least-recently-used eviction would evict
each block just before the next step needs it. Therefore a fixed set of blocks is resident, and the
others pass through buffers: no policy reads less in a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from interposer.errors import ConfigError

Where = Literal["resident", "streamed", "mapped"]
Source = Literal["disk", "host"]

_TRANSFERS = {"disk": "read from the disk", "host": "copied from host memory"}
_DISK_BUFFERS, _HOST_BUFFERS = 3, 2


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Sizes of a block's weights.

    Attributes:
        num_bytes: weights that every step reads.
        expert_bytes: weights of experts, of which a step reads the ones that tokens are routed to.
    """

    name: str
    num_bytes: int
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the weights and experts of a block lie, and the reason."""

    size: BlockSize
    where: Where
    experts: Where
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Where a model's weights lie.

    Attributes:
        source: where weights that are not resident are read from.
        budget_bytes: limit for resident weights and buffers.
        other_bytes: weights outside of blocks, which are resident.
        num_buffers: number of buffers for streamed blocks.
        places: of all blocks, in order.
        is_automatic: the user did not request offload.
    """

    source: Source
    budget_bytes: int
    other_bytes: int
    num_buffers: int
    places: tuple[BlockPlace, ...]
    is_automatic: bool = False

    @property
    def streamed(self) -> tuple[int, ...]:
        """Numbers of the streamed blocks."""
        return tuple(i for i, place in enumerate(self.places) if place.where == "streamed")

    @property
    def offloads(self) -> bool:
        """Whether any weights are not resident."""
        return any(at != "resident" for place in self.places for at in (place.where, place.experts))

    def notes(self) -> list[str]:
        """Return a line on all weights, and a line for each run of blocks with the same place."""
        total = self.other_bytes + sum(_all_bytes(place.size) for place in self.places)
        origin = "as nobody said otherwise" if self.is_automatic else "as asked for"
        lines = [
            f"offload: the weights take {_size(total)}, {_size(self.budget_bytes)} of it may be "
            f"resident, {origin}; outside of blocks {_size(self.other_bytes)}, resident"
        ]
        numbers_by_place: dict[tuple[str, str, str], list[int]] = {}
        for number, place in enumerate(self.places):
            key = place.where, place.experts if place.size.expert_bytes else "", place.reason
            numbers_by_place.setdefault(key, []).append(number)
        for (where, experts, reason), numbers in numbers_by_place.items():
            num_bytes = sum(self.places[number].size.num_bytes for number in numbers)
            text = f"offload: blocks {_ranges(numbers)} {where}, {_size(num_bytes)}"
            if experts:
                num_bytes = sum(self.places[number].size.expert_bytes for number in numbers)
                text += f", and {_size(num_bytes)} of experts {experts}"
            lines.append(f"{text}: {reason}")
        return lines


def plan_offload(
    sizes: Sequence[BlockSize],
    other_bytes: int,
    budget_bytes: int,
    source: Source,
    *,
    can_map: bool,
    is_automatic: bool = False,
) -> OffloadPlan:
    """Place blocks so that resident weights and buffers stay within the budget.

    Args:
        can_map: experts can be read in place, from the disk or host memory.
    Raises: ConfigError: buffers and weights outside of blocks exceed the budget.
    """
    block_bytes = [size.num_bytes + (0 if can_map else size.expert_bytes) for size in sizes]
    mapped_bytes = [size.expert_bytes if can_map else 0 for size in sizes]
    all_blocks = range(len(sizes))
    num_buffers = 0
    resident = set(all_blocks)
    if other_bytes + sum(block_bytes) > budget_bytes:
        num_buffers = min(_DISK_BUFFERS if source == "disk" else _HOST_BUFFERS, len(sizes))
        # Each buffer must hold the largest block.
        min_bytes = other_bytes + num_buffers * max(block_bytes)
        if min_bytes > budget_bytes:
            raise ConfigError(
                f"{_size(budget_bytes)} may be resident, but what is outside of blocks takes "
                f"{_size(other_bytes)} and {num_buffers} buffers "
                f"{_size(num_buffers * max(block_bytes))}. "
                f"Try: a budget of {min_bytes} bytes at least"
            )
        resident = _spread(block_bytes, budget_bytes - min_bytes)
    free_bytes = budget_bytes - other_bytes - sum(block_bytes[i] for i in resident)
    free_bytes -= num_buffers * max(block_bytes, default=0)
    # The page cache of a host keeps experts that are used often; a device has no such cache.
    resident_experts = _spread(mapped_bytes, free_bytes if source == "host" else 0)
    if sum(mapped_bytes) <= free_bytes:
        resident_experts = set(all_blocks)
    places = []
    for i, size in enumerate(sizes):
        where: Where = "resident" if i in resident else "streamed"
        experts: Where = where
        if mapped_bytes[i]:
            experts = "resident" if i in resident_experts else "mapped"
        places.append(BlockPlace(size, where, experts, _reason(where, experts, source)))
    return OffloadPlan(source, budget_bytes, other_bytes, num_buffers, tuple(places), is_automatic)


def _spread(sizes: Sequence[int], free_bytes: int) -> set[int]:
    """Return the largest set of blocks that fits, spread evenly over the model.

    While a resident block computes, streamed blocks after it are being read.
    """
    count = len(sizes)
    # Blocks differ in size: try each number, from all blocks down.
    for num_resident in range(count, 0, -1):
        chosen = {(2 * i + 1) * count // (2 * num_resident) for i in range(num_resident)}
        if sum(sizes[i] for i in chosen) <= free_bytes:
            return chosen
    return set()


def _reason(where: Where, experts: Where, source: Source) -> str:
    transfer = _TRANSFERS[source]
    if where == "streamed":
        text = f"{transfer} in every step while the blocks before compute"
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
