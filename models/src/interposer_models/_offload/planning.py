"""The plan of offload for a model on the meta device: the way there is, and what lies where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from interposer import CausalModel, Placement, Ranks, Verdict
from interposer.errors import ConfigError
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.ungated_experts import UngatedExperts
from interposer_models._engine.cache_budget import is_host
from interposer_models._offload.placing import BlockSize, OffloadPlan, Source, placed
from interposer_models._offload.settings import Offload
from interposer_ops.layers.experts import Experts

Mixture = Experts | UngatedExperts

_FITTING = 0.9
_ROOM = {"disk": 0.6, "host": 0.8}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a model's weights.

    Attributes:
        blocks: in order.
        other_bytes: of all else.
    """

    blocks: tuple[BlockSize, ...]
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        blocks = sum(block.num_bytes + block.expert_bytes for block in self.blocks)
        return blocks + self.other_bytes


@dataclass(frozen=True, slots=True)
class Offloading:
    """Offload as it was decided for a model, to be decided again once sizes are known exactly.

    Attributes:
        free_bytes: of the memory that computes, 0 where nobody tells.
        can_map: experts can be read in place.
    """

    asked: Offload
    free_bytes: int
    source: Source
    can_map: bool
    is_automatic: bool
    plan: OffloadPlan

    def judged(self, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict on capturing or compiling steps; None where nobody asks for it."""
        if verdict is None:
            return None
        return Verdict.refuse(
            "weights are offloaded, and the host says in each step when they come. "
            "Try: load(..., offload=False), or do without"
        )

    def again(self, sizes: Sizes) -> OffloadPlan:
        """Return the plan for these sizes.

        Raises: ConfigError: the budget is too small.
        """
        if self.is_automatic and sizes.num_bytes <= _FITTING * self.free_bytes:
            budget = sizes.num_bytes  # quantized, it fits after all
        else:
            room = int(self.free_bytes * _ROOM[self.source])
            budget = self.asked.budget(sizes.num_bytes, room)
        return placed(
            sizes.blocks,
            sizes.other_bytes,
            budget,
            self.source,
            can_map=self.can_map,
            is_automatic=self.is_automatic,
        )


def offloading(
    asked: bool | int | str | None,
    model: CausalModel,
    placement: Placement,
    notes: list[str],
    packed: str,
    ranks: Ranks | None = None,
) -> Offloading | None:
    """Return what is offloaded of a model; None where all of it is resident.

    Weights of a host that exceed its memory are offloaded unless somebody forbids it. Of a device
    that they exceed, the notes say so, and what could be done.

    Args:
        notes: gets what lies where and why.
        packed: of the ``Config``.
        ranks: that hold shares of the model; those of one host find an equal part of it free.
    Raises: ConfigError: offload is asked for and cannot be, or the budget is too small.
    """
    settings = Offload.of(asked)
    if asked is False:
        return None
    way = _way(model, placement, packed)
    if settings is not None and isinstance(way, Verdict):
        raise ConfigError(f"offload was asked for, but {way.reason}")
    free_bytes = _free_bytes(placement, asks=settings is not None or is_host(placement.platform))
    if ranks is not None and is_host(placement.platform):
        free_bytes //= _neighbours(ranks)
    sizes = _sizes(model)
    exceeds = bool(free_bytes) and sizes.num_bytes > _FITTING * free_bytes
    if settings is None and not exceeds:
        return None
    if isinstance(way, Verdict):
        notes.append(f"offload: none, though {_exceeding(sizes, free_bytes)}: {way.reason}")
        return None
    source, can_map = way
    empty = OffloadPlan(source, 0, 0, 0, ())
    is_automatic = settings is None
    found = Offloading(settings or Offload(), free_bytes, source, can_map, is_automatic, empty)
    try:
        found = replace(found, plan=found.again(sizes))
    except ConfigError as error:
        if not is_automatic:
            raise
        notes.append(f"offload: none, though {_exceeding(sizes, free_bytes)}: {error}")
        return None
    if is_automatic and source == "host":
        notes.append(
            f"offload: none, and {_exceeding(sizes, free_bytes)}. Try: load(..., offload=True), "
            "for which the next lines hold"
        )
        notes += found.plan.notes()
        return None
    notes += found.plan.notes()
    return found


def blocks_of(model: CausalModel) -> Sequence[nn.Module]:
    """Return the blocks that a model computes in order; none where it is no plain decoder."""
    return [*model.model.layers] if isinstance(model, CausalLM) else []


def mixtures(block: nn.Module) -> list[Mixture]:
    """Return the layers of a block that have experts."""
    return [part for part in block.modules() if isinstance(part, (Experts, UngatedExperts))]


def expert_layers(block: nn.Module) -> set[nn.Module]:
    """Return the layers of a block that only some tokens visit."""
    return {layer for part in mixtures(block) for layer in part.modules()}


def _way(model: CausalModel, placement: Placement, packed: str) -> tuple[Source, bool] | Verdict:
    platform = placement.platform
    if not blocks_of(model):
        return Verdict.refuse(
            f"{type(model).__name__} is no decoder of blocks that follow each other. Try: weights "
            "of fewer bits, load(..., quantization='int8')"
        )
    if placement.described:
        if not is_host(platform):  # most platforms copy beside computing; fewer map
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
    """Return the bytes that weights find free; a device is initialised only if it ``asks``."""
    capability = placement.device.capability
    if placement.described or not asks:
        return capability.memory_bytes
    return placement.platform.memory(placement.device.torch_device).free_bytes


def _neighbours(ranks: Ranks) -> int:
    """Return how many ranks have the platform and the host of this one, itself among them."""
    places = [*zip(ranks.hosts, ranks.platforms, strict=True)]
    return places.count(places[ranks.rank])


def _sizes(model: CausalModel) -> Sizes:
    blocks, seen = [], set()
    for number, block in enumerate(blocks_of(model)):
        layers = expert_layers(block)
        mixed = {id(p): p.nbytes for part in layers for p in part.parameters(recurse=False)}
        own = {id(p): p.nbytes for p in block.parameters() if id(p) not in mixed}
        seen |= mixed.keys() | own.keys()
        blocks.append(BlockSize(f"block {number}", sum(own.values()), sum(mixed.values())))
    others = sum(p.nbytes for p in model.parameters() if id(p) not in seen)
    return Sizes(tuple(blocks), others)


def _exceeding(sizes: Sizes, free_bytes: int) -> str:
    weights, free = (f"{count / 2**30:.2f} GiB" for count in (sizes.num_bytes, free_bytes))
    return f"the weights take {weights} and {free} are free"
