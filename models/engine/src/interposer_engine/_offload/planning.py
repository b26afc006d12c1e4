"""Planning of weight offload for a model on the meta device: resident and streamed blocks.

The plan follows from sizes and a memory budget alone; it is plain data with reasons. Every step
reads every block once, in order. A cache with least-recently-used eviction would evict each block
just before the next step needs it. Therefore a fixed set of blocks is resident, and the others pass
through buffers: no policy reads less in a cycle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from torch import nn

from interposer import CausalModel, Placement, Ranks, Verdict
from interposer.errors import ConfigError
from interposer_engine._kv_cache_budget import is_host
from interposer_models import CausalLM
from interposer_models.decoder import UngatedExperts
from interposer_ops.layers.moe.experts import Experts

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Offload:
    """Limit on resident weights; all other weights stay in host memory or on disk.

    Attributes:
        resident_bytes: limit for resident weights and for the buffers of the others; None applies
            the fraction.
        resident_fraction: the same limit as a fraction of all weights, from 0 to 1; None takes a
            fraction of the free memory, 0.8 of an accelerator's and 0.6 of a host's.
    Raises: ConfigError: a number is out of range.
    """

    resident_bytes: int | None = None
    resident_fraction: float | None = None

    def __post_init__(self) -> None:
        size, fraction = self.resident_bytes, self.resident_fraction
        if size is not None and size < 0:
            raise ConfigError(f"offload is {size} bytes, must be at least 0")
        if fraction is not None and fraction > 1:
            raise ConfigError(f"offload is {fraction:.0%}, must be at most 100% of the weights")

    @classmethod
    def of(cls, option: bool | int | str | None) -> Offload | None:
        """Parse the option ``offload`` of ``load``; return None for None and False.

        Args:
            option: bytes, or a text such as ``"8GiB"`` or ``"50%"`` of the weights; True takes the
                defaults.
        Raises: ConfigError: the option states no size.
        """
        if option is None or option is False:
            return None
        if option is True:
            return cls()
        if isinstance(option, int):  # bool is handled above
            return cls(resident_bytes=option)
        if isinstance(option, str) and (match := _TEXT.fullmatch(option)):
            number, unit = float(match[1]), match[2].upper()
            if unit == "%":
                return cls(resident_fraction=number / 100)
            if unit in _UNITS:
                return cls(resident_bytes=int(number * _UNITS[unit]))
        raise ConfigError(
            f"offload is {option!r}, must be True, False, a number of bytes, or a size such as "
            "'8GiB' or '50%'"
        )

    def budget(self, weight_bytes: int, default_bytes: int) -> int:
        """Return the limit for resident weights in bytes.

        Args:
            weight_bytes: size of all weights.
            default_bytes: limit if the settings state none.
        """
        if self.resident_bytes is not None:
            return self.resident_bytes
        if self.resident_fraction is not None:
            return int(self.resident_fraction * weight_bytes)
        return default_bytes


Where = Literal["resident", "streamed", "mapped"]
Source = Literal["disk", "host"]

_TRANSFERS = {"disk": "read from the disk", "host": "copied from host memory"}
_DISK_BUFFERS, _HOST_BUFFERS = 3, 2


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Sizes of one decoder block's weights, with those of experts apart.

    Attributes:
        num_bytes: weights that every step reads.
        expert_bytes: weights of experts, of which a step reads the ones that tokens are routed to.
    """

    name: str
    num_bytes: int
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the weights and experts of a decoder block are stored, and the reason."""

    size: BlockSize
    where: Where
    experts: Where
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Where all weights of a model are stored: resident, in host memory, or on disk.

    Attributes:
        source: where weights that are not resident are read from.
        budget_bytes: limit for resident weights and buffers.
        other_bytes: weights outside of blocks, which are resident.
        num_buffers: number of buffers for streamed blocks.
        places: the place of each block, in order.
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
        """Return a line on all weights, and a line for each run of equally stored blocks."""
        total = self.other_bytes + sum(_all_bytes(place.size) for place in self.places)
        origin = "by default" if self.is_automatic else "as requested"
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
    """Choose where each block is stored, so that resident weights and buffers fit the budget.

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
                f"{_size(budget_bytes)} may be resident, but weights outside of blocks take "
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
    """Return the largest set of blocks that fits the budget, spread evenly over the model.

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


ExpertLayer = Experts | UngatedExperts

_MAX_RESIDENT_FRACTION = 0.9  # of the free memory; a larger model is offloaded
_BUDGET_FRACTIONS = {"disk": 0.6, "host": 0.8}  # of the free memory, for an offloaded model


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all weights of a model.

    Attributes:
        blocks: sizes of the blocks, in order.
        other_bytes: weights outside of blocks.
    """

    blocks: tuple[BlockSize, ...]
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of all weights in bytes."""
        blocks = sum(block.num_bytes + block.expert_bytes for block in self.blocks)
        return blocks + self.other_bytes


@dataclass(frozen=True, slots=True)
class Offloading:
    """The offload plan from before loading, which ``again`` repeats with exact sizes.

    Attributes:
        settings: the settings that the user requested, or the defaults.
        free_bytes: free memory of the computing device; 0 if unknown.
        can_map: experts can be read in place.
    """

    settings: Offload
    free_bytes: int
    source: Source
    can_map: bool
    is_automatic: bool
    plan: OffloadPlan

    def judge_capture(self, verdict: Verdict | None) -> Verdict | None:
        """Return a refusal to capture or compile steps with streamed weights; None for None."""
        if verdict is None:
            return None
        return Verdict.refuse(
            "weights are offloaded, and the host waits in each step for the weights of a block. "
            "Try: load(..., offload=False), or neither graphs nor compilation"
        )

    def again(self, sizes: Sizes) -> OffloadPlan:
        """Plan the offload again with the exact sizes of the weights.

        Raises: ConfigError: the budget is too small.
        """
        # Sizes on the meta device can exceed those of quantized or packed weights.
        if self.is_automatic and sizes.num_bytes <= _MAX_RESIDENT_FRACTION * self.free_bytes:
            budget = sizes.num_bytes  # the quantized weights fit
        else:
            default_bytes = int(self.free_bytes * _BUDGET_FRACTIONS[self.source])
            budget = self.settings.budget(sizes.num_bytes, default_bytes)
        return plan_offload(
            sizes.blocks,
            sizes.other_bytes,
            budget,
            self.source,
            can_map=self.can_map,
            is_automatic=self.is_automatic,
        )


def plan_offloading(
    option: bool | int | str | None,
    model: CausalModel,
    placement: Placement,
    packed: str,
    ranks: Ranks | None = None,
) -> tuple[Offloading | None, list[str]]:
    """Plan which weights of a model stay resident on the device.

    Weights that exceed a host's memory are offloaded unless ``option`` is False. For weights that
    exceed a device's memory, the notes suggest offload.

    Args:
        packed: the setting of the ``Config``.
        ranks: ranks that hold shards of the model; ranks of one host share the free memory.
    Returns: the offload plan, None if all weights are resident; and notes on the place of weights
        and the reason.
    Raises: ConfigError: offload is requested but impossible, or the budget is too small.
    """
    settings = Offload.of(option)
    if option is False:
        return None, []
    source_or_refusal = _source(model, placement, packed)
    if settings is not None and isinstance(source_or_refusal, Verdict):
        raise ConfigError(f"offload was requested, but {source_or_refusal.reason}")
    free_bytes = _free_bytes(placement, asks=settings is not None or is_host(placement.platform))
    # Devices belong to one rank each, but the ranks of a host share its memory.
    if ranks is not None and is_host(placement.platform):
        free_bytes //= _neighbours(ranks)
    sizes = _sizes(model)
    exceeds = bool(free_bytes) and sizes.num_bytes > _MAX_RESIDENT_FRACTION * free_bytes
    if settings is None and not exceeds:
        return None, []
    if isinstance(source_or_refusal, Verdict):
        reason = source_or_refusal.reason
        return None, [f"offload: none, though {_describe_excess(sizes, free_bytes)}: {reason}"]
    source, can_map = source_or_refusal
    # The sizes of quantized weights are estimates: ``again`` uses exact ones after loading.
    empty = OffloadPlan(source, 0, 0, 0, ())
    is_automatic = settings is None
    decision = Offloading(settings or Offload(), free_bytes, source, can_map, is_automatic, empty)
    try:
        decision = replace(decision, plan=decision.again(sizes))
    except ConfigError as error:
        if not is_automatic:
            raise
        return None, [f"offload: none, though {_describe_excess(sizes, free_bytes)}: {error}"]
    notes = decision.plan.notes()
    if is_automatic and source == "host":
        suggestion = (
            f"offload: none, and {_describe_excess(sizes, free_bytes)}. "
            "Try: load(..., offload=True), for which the next lines hold"
        )
        return None, [suggestion, *notes]
    return decision, notes


def blocks_of(model: CausalModel) -> Sequence[nn.Module]:
    """Return a decoder's blocks in the order of computation; empty for other models."""
    return [*model.model.layers] if isinstance(model, CausalLM) else []


def moe_layers(block: nn.Module) -> list[ExpertLayer]:
    """Return the MoE layers of a decoder block."""
    return [part for part in block.modules() if isinstance(part, (Experts, UngatedExperts))]


def expert_layers(block: nn.Module) -> set[nn.Module]:
    """Return the layers of a decoder block that only process tokens routed to experts."""
    return {layer for part in moe_layers(block) for layer in part.modules()}


def _source(model: CausalModel, placement: Placement, packed: str) -> tuple[Source, bool] | Verdict:
    platform = placement.platform
    if not blocks_of(model):
        return Verdict.refuse(
            f"{type(model).__name__} is no decoder of blocks that follow each other. Try: weights "
            "of fewer bits, load(..., quantization='int8')"
        )
    if placement.described:
        # Without the device, assume the common case: copies overlap, host memory is not mapped.
        if not is_host(platform):
            return "host", False
    elif platform.provides("stream") and platform.provides("pin_memory"):
        return "host", bool(platform.provides("map_host_memory"))
    elif not is_host(platform):
        return Verdict.refuse(
            f"platform {platform.name!r} provides no stream and no pinned memory to copy weights "
            "from. Try: weights of fewer bits, load(..., quantization='int8')"
        )
    if packed == "off":
        return Verdict.refuse(
            "weights come from a packed file, and Config(packed='off') says that there is none. "
            "Try: packed='auto'"
        )
    return "disk", True


def _free_bytes(placement: Placement, asks: bool) -> int:
    """Return the free memory for weights; access the device only if ``asks`` is true."""
    capability = placement.device.capability
    if placement.described or not asks:
        return capability.memory_bytes
    return placement.platform.memory(placement.device.torch_device).free_bytes


def _neighbours(ranks: Ranks) -> int:
    """Return the number of ranks on this host and platform, including this rank."""
    places = [*zip(ranks.hosts, ranks.platforms, strict=True)]
    return places.count(places[ranks.rank])


def _sizes(model: CausalModel) -> Sizes:
    blocks, block_parameters = [], set()
    for number, block in enumerate(blocks_of(model)):
        layers = expert_layers(block)
        # By id, so that a parameter that several layers share counts once.
        experts = {id(p): p.nbytes for part in layers for p in part.parameters(recurse=False)}
        outside_experts = {id(p): p.nbytes for p in block.parameters() if id(p) not in experts}
        block_parameters |= experts.keys() | outside_experts.keys()
        blocks.append(
            BlockSize(f"block {number}", sum(outside_experts.values()), sum(experts.values()))
        )
    other_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in block_parameters)
    return Sizes(tuple(blocks), other_bytes)


def _describe_excess(sizes: Sizes, free_bytes: int) -> str:
    weights, free = (f"{count / 2**30:.2f} GiB" for count in (sizes.num_bytes, free_bytes))
    return f"the weights take {weights} and {free} are free"
