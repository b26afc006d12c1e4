"""Plans weight offload for a model on the meta device: source, resident and streamed blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from interposer import CausalModel, Placement, Ranks, Verdict
from interposer.errors import ConfigError
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.ungated_experts import UngatedExperts
from interposer_models._engine.cache_budget import is_host
from interposer_models._offload.placing import BlockSize, OffloadPlan, Source, plan_offload
from interposer_models._offload.settings import Offload
from interposer_ops.layers.experts import Experts

ExpertLayer = Experts | UngatedExperts

_MAX_RESIDENT_FRACTION = 0.9  # of the free memory; a larger model is offloaded
_BUDGET_FRACTIONS = {"disk": 0.6, "host": 0.8}  # of the free memory, for an offloaded model


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model's weights.

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
    """Offload as planned before loading; ``again`` repeats the plan with exact sizes.

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

    def judged(self, verdict: Verdict | None) -> Verdict | None:
        """Return a refusal to capture or compile steps; None if ``verdict`` is None."""
        if verdict is None:
            return None
        return Verdict.refuse(
            "weights are offloaded, and the host says in each step when they come. "
            "Try: load(..., offload=False), or do without"
        )

    def again(self, sizes: Sizes) -> OffloadPlan:
        """Return the plan for exact sizes.

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


def offloading(
    option: bool | int | str | None,
    model: CausalModel,
    placement: Placement,
    notes: list[str],
    packed: str,
    ranks: Ranks | None = None,
) -> Offloading | None:
    """Return the offload plan of a model; None if all weights are resident.

    Weights that exceed a host's memory are offloaded unless ``option`` is False. For weights that
    exceed a device's memory, the notes suggest offload.

    Args:
        notes: receives lines on the place of weights and the reason.
        packed: the setting of the ``Config``.
        ranks: ranks that hold shards of the model; ranks of one host share the free memory.
    Raises: ConfigError: offload is requested but impossible, or the budget is too small.
    """
    settings = Offload.of(option)
    if option is False:
        return None
    source_or_refusal = _source(model, placement, packed)
    if settings is not None and isinstance(source_or_refusal, Verdict):
        raise ConfigError(f"offload was asked for, but {source_or_refusal.reason}")
    free_bytes = _free_bytes(placement, asks=settings is not None or is_host(placement.platform))
    # Devices belong to one rank each, but the ranks of a host share its memory.
    if ranks is not None and is_host(placement.platform):
        free_bytes //= _neighbours(ranks)
    sizes = _sizes(model)
    exceeds = bool(free_bytes) and sizes.num_bytes > _MAX_RESIDENT_FRACTION * free_bytes
    if settings is None and not exceeds:
        return None
    if isinstance(source_or_refusal, Verdict):
        notes.append(
            f"offload: none, though {_exceeding(sizes, free_bytes)}: {source_or_refusal.reason}"
        )
        return None
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
        notes.append(f"offload: none, though {_exceeding(sizes, free_bytes)}: {error}")
        return None
    if is_automatic and source == "host":
        notes.append(
            f"offload: none, and {_exceeding(sizes, free_bytes)}. Try: load(..., offload=True), "
            "for which the next lines hold"
        )
        notes += decision.plan.notes()
        return None
    notes += decision.plan.notes()
    return decision


def blocks_of(model: CausalModel) -> Sequence[nn.Module]:
    """Return the blocks that a decoder computes in order; empty for other models."""
    return [*model.model.layers] if isinstance(model, CausalLM) else []


def moe_layers(block: nn.Module) -> list[ExpertLayer]:
    """Return the layers of a block that have experts."""
    return [part for part in block.modules() if isinstance(part, (Experts, UngatedExperts))]


def expert_layers(block: nn.Module) -> set[nn.Module]:
    """Return the layers of a block that only some tokens are routed to."""
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
    """Return the free memory for weights; query, and initialize, the device only if ``asks``."""
    capability = placement.device.capability
    if placement.described or not asks:
        return capability.memory_bytes
    return placement.platform.memory(placement.device.torch_device).free_bytes


def _neighbours(ranks: Ranks) -> int:
    """Return how many ranks share platform and host with this one, including this one."""
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


def _exceeding(sizes: Sizes, free_bytes: int) -> str:
    weights, free = (f"{count / 2**30:.2f} GiB" for count in (sizes.num_bytes, free_bytes))
    return f"the weights take {weights} and {free} are free"
