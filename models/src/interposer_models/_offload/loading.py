"""Loading of a model with offloaded blocks: their states lie over buffers that are filled later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from interposer import CheckpointFile
from interposer.errors import ConfigError
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.layer_group import LayerGroup
from interposer_models._checkpoint.weights import Progress, Weights
from interposer_models._offload.device_copies import DeviceCopies, Packet
from interposer_models._offload.disk import DiskReader, Extents
from interposer_models._offload.expert_reads import ExpertMemory, ExpertReads
from interposer_models._offload.placing import BlockSize, OffloadPlan
from interposer_models._offload.planning import (
    Mixture,
    Offloading,
    Sizes,
    blocks_of,
    expert_layers,
    mixtures,
)
from interposer_models._offload.ring import Ring
from interposer_models._packed.expert_memories import expert_memories
from interposer_models._packed.filling import (
    REFUSALS,
    MemoryOf,
    attempted,
    packed_file,
    read,
    restore,
    states_of,
)
from interposer_models._packed.group_states import GroupData, keep_states
from interposer_models._packed.packed_file import MappedMemory, PackedFile
from interposer_models._packed.packed_loading import load_weights
from interposer_models._plan import Plan

_NOTE = "offload: "
_FIXED = (
    "offloaded weights cannot be exchanged: buffers hold them for the time of their block. "
    "Try: load the new checkpoint, or load(..., offload=False)"
)


class _Members:
    """The memories of a model, by the block and the kind of layer that they belong to."""

    def __init__(self, planned: Plan, weights: Weights) -> None:
        self.blocks = blocks_of(planned.model)
        owners = {layer: i for i, block in enumerate(self.blocks) for layer in block.modules()}
        mixed = {layer for block in self.blocks for layer in expert_layers(block)}
        # Whose block a group is in, None where it is in none, and whether experts have it.
        self.owner: dict[int, tuple[int | None, bool]] = {}
        for number, group in weights.groups():
            found = {owners.get(layer) for layer in group.layers}
            block = found.pop() if len(found) == 1 else None
            self.owner[number] = block, block is not None and mixed.issuperset(group.layers)
        self.memories: dict[tuple[int | None, bool], list[int]] = defaultdict(list)
        # The group of each layer, and its place among the layers of that.
        self.places = {
            layer: (number, place)
            for number, group in weights.groups()
            for place, layer in enumerate(group.layers)
        }

    def note(self, group: int, memories: Iterable[int]) -> None:
        """Know that a group has memories."""
        self.memories[self.owner[group]] += memories

    def experts(self, mixture: Mixture, states: GroupData) -> dict[int, int | None]:
        """Return the expert of each memory of a mixture, None where it has shares of all.

        Experts that are layers of their own are its children, and have their numbers as names.
        """
        found: dict[int, int | None] = {}
        for name, layer in mixture.named_modules():
            if layer in self.places:
                group, place = self.places[layer]
                held = expert_memories(states[str(group)][place], mixture.spec.num_experts)
                first = name.partition(".")[0]
                found |= dict.fromkeys(held, int(first)) if first.isdigit() else held
        return found

    def of(self, block: int, with_experts: bool) -> list[int]:
        """Return the memories of a block."""
        experts = self.memories[block, True] if with_experts else []
        return [*self.memories[block, False], *experts]

    def sizes(self, bytes_of: Callable[[int], int]) -> Sizes:
        """Return the bytes of all blocks and of what is outside."""

        def total(block: int | None, mixed: bool) -> int:
            return sum(map(bytes_of, self.memories[block, mixed]))

        blocks = tuple(
            BlockSize(f"block {number}", total(number, False), total(number, True))
            for number in range(len(self.blocks))
        )
        return Sizes(blocks, total(None, False) + total(None, True))


def load_offloaded(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> None:
    """Fill the model of a plan as its offload says, or all of it where nothing is offloaded.

    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: layers hold what lies nowhere but in the memory that computes, the weights
            cannot be packed, or the budget is too small.
    """
    decided = planned.offload
    if decided is None:
        load_weights(planned, checkpoint, weights, progress)
        return
    fill = _from_disk if decided.source == "disk" else _from_host

    def filled(advance: Progress) -> None:
        fill(planned, decided, checkpoint, weights, advance)

    refusal = attempted(filled, progress, (*REFUSALS, ConfigError))
    if refusal is None:
        return
    if not decided.is_automatic:
        raise ConfigError(f"offload was asked for, but {refusal}") from refusal
    _renote(planned, [f"{_NOTE}none, {refusal}"])
    load_weights(planned, checkpoint, weights, progress)


def _from_disk(
    planned: Plan,
    decided: Offloading,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> None:
    """Map a packed file, whose streamed blocks are read into buffers instead."""
    file = packed_file(planned, checkpoint, weights, progress)
    memory, bounds = file.memory(ahead=False), file.facts.memories
    members = _noted(planned, weights, file, memory.__getitem__)
    plan = decided.again(members.sizes(lambda number: bounds[number][1]))
    parts = [
        Extents({number: bounds[number] for number in _moved(plan, members, block)})
        for block in plan.streamed
    ]
    reader = DiskReader(file.path, parts, plan.num_buffers) if parts else None
    places = {
        number: (position % plan.num_buffers, at, bounds[number][1])
        for position, extents in enumerate(parts)
        for number, at in extents.places.items()
        if bounds[number][1]
    }

    def memory_of(number: int) -> torch.Tensor:
        place = places.get(number)
        return memory[number] if reader is None or place is None else reader.memory(*place)

    restore(weights, file.facts.states, memory_of)
    comes = _advise(plan, members, file, memory)
    for number in range(len(bounds)):
        if number not in comes and number not in places:
            memory.advise(number)
    if reader is not None:
        _attach(plan, members, reader, weights)
    _renote(planned, plan.notes() if plan.offloads else [])


def _from_host(
    planned: Plan,
    decided: Offloading,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> None:
    """Finalize layers on the device one after the other, and move what is offloaded to the host."""
    plan, platform = decided.plan, planned.placement.platform
    device = planned.placement.device.torch_device
    members = _Members(planned, weights)
    memories: dict[int, torch.Tensor] = {}

    def hold(memory: torch.Tensor) -> int:
        memories[len(memories)] = memory
        return len(memories) - 1

    states: GroupData = {}

    def keep(number: int, group: LayerGroup) -> None:
        first = len(memories)
        keep_states(states, number, group, hold, device)
        new = range(first, len(memories))
        members.note(number, new)
        block, is_mixed = members.owner[number]
        if block is None:
            return
        place = plan.places[block]
        if (place.experts if is_mixed else place.where) != "resident":
            for moved in new:
                memories[moved] = memories[moved].to("cpu")

    read(planned, checkpoint, weights, progress, keep, copies=False)

    def packet(numbers: Iterable[int]) -> Packet:
        return Packet({n: memories.pop(n) for n in numbers}, platform)

    bytes_of = {number: memory.nbytes for number, memory in memories.items()}
    held: dict[int, torch.Tensor] = {}
    for block, place in enumerate(plan.places):
        numbers = members.memories[block, True]
        if place.experts == "mapped" and numbers:
            mapped = packet(numbers)
            seen = platform.map_host_memory(mapped.host)
            held |= {n: seen[at : at + bytes_of[n]] for n, at in mapped.places.items()}
    packets = [packet(_moved(plan, members, block)) for block in plan.streamed]
    if packets:
        copies = DeviceCopies(platform, device, packets, plan.num_buffers)
        for position, each in enumerate(packets):
            buffer = position % plan.num_buffers
            held |= {n: copies.memory(buffer, at, bytes_of[n]) for n, at in each.places.items()}
    held |= memories

    restore(weights, states, held.__getitem__)
    if packets:
        _attach(plan, members, copies, weights)


def _moved(plan: OffloadPlan, members: _Members, block: int) -> list[int]:
    """Return the memories of a streamed block that pass through a buffer."""
    return members.of(block, plan.places[block].experts == "streamed")


def _attach(
    plan: OffloadPlan, members: _Members, filler: DeviceCopies | DiskReader, weights: Weights
) -> None:
    ring = Ring(filler, len(plan.streamed), plan.num_buffers)
    ring.attach([members.blocks[number] for number in plan.streamed])
    weights.fixed = _FIXED


def _advise(
    plan: OffloadPlan, members: _Members, file: PackedFile, memory: MappedMemory
) -> set[int]:
    """Read experts of blocks that are mapped as tokens need them; return all such memories."""
    found: set[int] = set()
    bounds = file.facts.memories
    for block, place in enumerate(plan.places):
        if place.experts != "mapped":
            continue
        found.update(members.memories[block, True])
        for layer in mixtures(members.blocks[block]):
            owned = members.experts(layer, file.facts.states)
            held = [ExpertMemory(number, bounds[number][1], own) for number, own in owned.items()]
            ExpertReads(memory, held, layer.spec.num_experts).attach(layer)
    return found


def _noted(planned: Plan, weights: Weights, file: PackedFile, memory_of: MemoryOf) -> _Members:
    """Return which memories of a packed file each block has."""
    members = _Members(planned, weights)
    for number, group in weights.groups():
        used: dict[int, None] = {}

        def noted(memory: int, used: dict[int, None] = used) -> torch.Tensor:
            used[memory] = None
            return memory_of(memory)

        states_of(file.facts.states, number, group, noted)
        members.note(number, used)
    return members


def _renote(planned: Plan, lines: list[str]) -> None:
    """Put what is known now in the place of what was planned."""
    notes: list[Any] = planned.resolver.notes
    notes[:] = [*(note for note in notes if not note.startswith(_NOTE)), *lines]
