"""Loads a model with offloaded blocks, whose weights are copied to buffers during the steps.

Weights in pinned host memory are copied to device buffers parallel to the computation
(``DeviceCopies``); weights in a packed file are read into buffers by ``DiskReader``.

On an H100, tokens equalled the tokens of a resident model. Tests use a platform that presents the
CPU as a device, where copies are synchronous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from interposer import CheckpointFile, Platform
from interposer.errors import ConfigError
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.layers import LayerGroup
from interposer_engine._checkpoint.weights import Progress, Weights
from interposer_engine._offload.disk import (
    DiskReader,
    ExpertMemory,
    ExpertReads,
    Extents,
    Filler,
    Ring,
)
from interposer_engine._offload.planning import (
    BlockSize,
    ExpertLayer,
    Offloading,
    OffloadPlan,
    Sizes,
    blocks_of,
    expert_layers,
    moe_layers,
)
from interposer_engine._packed.file import MappedMemory, PackedFile
from interposer_engine._packed.loading import (
    REFUSALS,
    MemoryOf,
    load_weights,
    packed_file,
    read,
    restore,
    states_of,
    try_loading,
)
from interposer_engine._packed.states import GroupData, expert_memories, keep_states
from interposer_engine._plan import Plan

_ALIGNED_BYTES = 256
"""Alignment of tensors in a buffer, the same as that of the device's allocator."""

_FIXED = (
    "offloaded weights cannot be updated: a buffer holds them only while their block computes. "
    "Try: load the new checkpoint, or load(..., offload=False)"
)


def load_offloaded(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> list[str]:
    """Load the weights of a model, resident or streamed as its offload plan states.

    Without an offload plan, all weights are loaded through ``load_weights``.

    Returns: notes on the source and the place of the weights. With an offload plan, the notes
        have exact sizes, and replace the notes of the plan.

    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: a layer holds a value that cannot be moved, the weights cannot be packed, or
            the budget is too small.
    """
    offloading = planned.offload
    if offloading is None:
        return load_weights(planned, checkpoint, weights, progress)
    offload_notes: list[str] = []
    load_from_source = _from_disk if offloading.source == "disk" else _from_host

    def load(advance: Progress) -> None:
        offload_notes.extend(load_from_source(planned, offloading, checkpoint, weights, advance))

    refusal = try_loading(load, progress, (*REFUSALS, ConfigError))
    if refusal is None:
        return offload_notes
    if not offloading.is_automatic:
        raise ConfigError(f"offload was requested, but {refusal}") from refusal
    notes = load_weights(planned, checkpoint, weights, progress)
    return [f"offload: none, {refusal}", *notes]


def _from_disk(
    planned: Plan,
    offloading: Offloading,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> list[str]:
    """Map a packed file, but read streamed blocks into buffers; return a description of both."""
    file = packed_file(planned, checkpoint, weights, progress)
    memory, bounds = file.memory(ahead=False), file.facts.memories
    block_memories = _memories_of_file(planned, weights, file, memory.__getitem__)
    plan = offloading.again(block_memories.sizes(lambda number: bounds[number][1]))
    extents_by_block = [
        Extents(
            {number: bounds[number] for number in _streamed_memories(plan, block_memories, block)}
        )
        for block in plan.streamed
    ]
    reader = DiskReader(file.path, extents_by_block, plan.num_buffers) if extents_by_block else None
    places = {
        number: (position % plan.num_buffers, offset, bounds[number][1])
        for position, extents in enumerate(extents_by_block)
        for number, offset in extents.offsets.items()
        if bounds[number][1]
    }

    def memory_of(number: int) -> torch.Tensor:
        place = places.get(number)
        return memory[number] if reader is None or place is None else reader.memory(*place)

    restore(weights, file.facts.states, memory_of)
    mapped_on_demand = _advise(plan, block_memories, file, memory)
    # Start to read resident memories now; others are read when blocks or experts need them.
    for number in range(len(bounds)):
        if number not in mapped_on_demand and number not in places:
            memory.advise(number)
    if reader is not None:
        _attach(plan, block_memories, reader, weights)
    return plan.notes() if plan.offloads else []


def _from_host(
    planned: Plan,
    offloading: Offloading,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> list[str]:
    """Finalize layers on the device, and move offloaded ones to the host; describe the result."""
    plan, platform = offloading.plan, planned.placement.platform
    device = planned.placement.device.torch_device
    block_memories = _BlockMemories(planned, weights)
    memories: dict[int, torch.Tensor] = {}

    def hold(memory: torch.Tensor) -> int:
        memories[len(memories)] = memory
        return len(memories) - 1

    states: GroupData = {}

    def keep(number: int, group: LayerGroup) -> None:
        first = len(memories)
        keep_states(states, number, group, hold, device)
        new_memories = range(first, len(memories))
        block_memories.add(number, new_memories)
        block, has_experts = block_memories.owner[number]
        if block is None:
            return
        place = plan.places[block]
        if (place.experts if has_experts else place.where) != "resident":
            for memory_number in new_memories:
                memories[memory_number] = memories[memory_number].to("cpu")

    # ``keep`` holds the tensors of finalized layers without a copy, so that none may be borrowed.
    read(planned, checkpoint, weights, progress, keep, copies=False)

    def pinned(numbers: Iterable[int]) -> PinnedBlock:
        return PinnedBlock({n: memories.pop(n) for n in numbers}, platform)

    bytes_of = {number: memory.nbytes for number, memory in memories.items()}
    # The memory that each layer uses during steps, by its number.
    final_memories: dict[int, torch.Tensor] = {}
    for block, place in enumerate(plan.places):
        numbers = block_memories.memories[block, True]
        if place.experts == "mapped" and numbers:
            experts = pinned(numbers)
            device_view = platform.map_host_memory(experts.host)
            final_memories |= {
                number: device_view[offset : offset + bytes_of[number]]
                for number, offset in experts.offsets.items()
            }
    pinned_blocks = [
        pinned(_streamed_memories(plan, block_memories, block)) for block in plan.streamed
    ]
    if pinned_blocks:
        copies = DeviceCopies(platform, device, pinned_blocks, plan.num_buffers)
        for position, pinned_block in enumerate(pinned_blocks):
            buffer = position % plan.num_buffers
            final_memories |= {
                number: copies.memory(buffer, offset, bytes_of[number])
                for number, offset in pinned_block.offsets.items()
            }
    final_memories |= memories

    restore(weights, states, final_memories.__getitem__)
    if pinned_blocks:
        _attach(plan, block_memories, copies, weights)
    return plan.notes()


class PinnedBlock:
    """All weights of a decoder block, one after another in pinned host memory.

    Attributes:
        host: the pinned memory, uint8.
        offsets: offset of each memory in bytes, by number.
    """

    def __init__(self, memories: dict[int, torch.Tensor], platform: Platform) -> None:
        self.offsets: dict[int, int] = {}
        end = 0
        for number, memory in memories.items():
            self.offsets[number] = end
            end += -(-memory.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # Only copies from pinned memory run parallel to the host.
        self.host = platform.pin_memory(torch.empty(end, dtype=torch.uint8))
        for number, offset in self.offsets.items():
            memory = memories.pop(number)  # free it: one block is in memory twice, not the model
            self.host[offset : offset + memory.nbytes].copy_(memory)


class DeviceCopies(Filler):
    """Copies decoder blocks into device buffers on a separate stream, ordered by events."""

    def __init__(
        self,
        platform: Platform,
        device: str,
        pinned_blocks: Sequence[PinnedBlock],
        num_buffers: int,
    ) -> None:
        self._platform, self._device = platform, device
        self._host_blocks = [pinned_block.host for pinned_block in pinned_blocks]
        size = max(pinned_block.nbytes for pinned_block in self._host_blocks)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_buffers)
        ]
        # Host computation is synchronous and needs no events.
        self._is_queued = torch.device(device).type != "cpu"
        self._last_uses: list[Any] = [self._event() for _ in range(num_buffers)]

    def memory(self, buffer: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer, as uint8."""
        return self._buffers[buffer][offset : offset + num_bytes]

    def fill(self, block: int, buffer: int) -> Any:
        """Queue the copy of a block into a buffer, after the last work that uses the buffer."""
        pinned_block = self._host_blocks[block]
        with self._platform.stream(self._device):
            # The block that used the buffer before may still be computing.
            if (last_use := self._last_uses[buffer]) is not None:
                last_use.wait()
            self._buffers[buffer][: pinned_block.nbytes].copy_(pinned_block, non_blocking=True)
            return self._event()

    def wait(self, handle: Any) -> None:
        """Let work that is queued later wait for a copy."""
        if handle is not None:
            handle.wait()

    def done(self, buffer: int) -> None:
        """Let the next copy into a buffer wait for the work queued so far."""
        self._last_uses[buffer] = self._event()

    def _event(self) -> torch.Event | None:
        """Record an event on the current stream; None if the device is synchronous."""
        if not self._is_queued:
            return None
        event = torch.Event(self._device)
        event.record()
        return event


class _BlockMemories:
    """The tensor storages of a model by decoder block, with those of experts kept apart."""

    def __init__(self, planned: Plan, weights: Weights) -> None:
        self.blocks = blocks_of(planned.model)
        owners = {layer: i for i, block in enumerate(self.blocks) for layer in block.modules()}
        experts = {layer for block in self.blocks for layer in expert_layers(block)}
        # By group: the number of its block (None outside of blocks), and whether it has experts.
        self.owner: dict[int, tuple[int | None, bool]] = {}
        for number, group in weights.groups():
            blocks = {owners.get(layer) for layer in group.layers}
            # A group that several blocks share must be resident.
            block = blocks.pop() if len(blocks) == 1 else None
            self.owner[number] = block, block is not None and experts.issuperset(group.layers)
        self.memories: dict[tuple[int | None, bool], list[int]] = defaultdict(list)
        # By layer: the number of its group, and its position in the group.
        self.places = {
            layer: (number, place)
            for number, group in weights.groups()
            for place, layer in enumerate(group.layers)
        }

    def add(self, group: int, memories: Iterable[int]) -> None:
        """Record the tensor storages of a layer group."""
        self.memories[self.owner[group]] += memories

    def experts(self, expert_layer: ExpertLayer, states: GroupData) -> dict[int, int | None]:
        """Return the expert of each tensor storage of a layer; None for shared storages.

        Experts that are separate layers are children, named by number.
        """
        experts: dict[int, int | None] = {}
        for name, layer in expert_layer.named_modules():
            if layer in self.places:
                group, place = self.places[layer]
                memories = expert_memories(states[str(group)][place], expert_layer.spec.num_experts)
                child = name.partition(".")[0]
                experts |= dict.fromkeys(memories, int(child)) if child.isdigit() else memories
        return experts

    def of(self, block: int, with_experts: bool) -> list[int]:
        """Return the tensor storages of a block, with or without those of its experts."""
        experts = self.memories[block, True] if with_experts else []
        return [*self.memories[block, False], *experts]

    def sizes(self, bytes_of: Callable[[int], int]) -> Sizes:
        """Return the sizes of all blocks, and of the tensor storages outside of blocks."""

        def total(block: int | None, of_experts: bool) -> int:
            return sum(map(bytes_of, self.memories[block, of_experts]))

        blocks = tuple(
            BlockSize(f"block {number}", total(number, False), total(number, True))
            for number in range(len(self.blocks))
        )
        return Sizes(blocks, total(None, False) + total(None, True))


def _streamed_memories(plan: OffloadPlan, block_memories: _BlockMemories, block: int) -> list[int]:
    """Return the tensor storages of a streamed block that are copied through a buffer."""
    return block_memories.of(block, plan.places[block].experts == "streamed")


def _attach(
    plan: OffloadPlan,
    block_memories: _BlockMemories,
    filler: DeviceCopies | DiskReader,
    weights: Weights,
) -> None:
    ring = Ring(filler, len(plan.streamed), plan.num_buffers)
    ring.attach([block_memories.blocks[number] for number in plan.streamed])
    # An update would be overwritten when the block's buffer is filled the next time.
    weights.fixed = _FIXED


def _advise(
    plan: OffloadPlan, block_memories: _BlockMemories, file: PackedFile, memory: MappedMemory
) -> set[int]:
    """Let layers read memory-mapped experts on demand, and return these experts' storages."""
    expert_memory_numbers: set[int] = set()
    bounds = file.facts.memories
    for block, place in enumerate(plan.places):
        if place.experts != "mapped":
            continue
        expert_memory_numbers.update(block_memories.memories[block, True])
        for layer in moe_layers(block_memories.blocks[block]):
            experts = block_memories.experts(layer, file.facts.states)
            layer_memories = [
                ExpertMemory(number, bounds[number][1], expert)
                for number, expert in experts.items()
            ]
            ExpertReads(memory, layer_memories, layer.spec.num_experts).attach(layer)
    return expert_memory_numbers


def _memories_of_file(
    planned: Plan, weights: Weights, file: PackedFile, memory_of: MemoryOf
) -> _BlockMemories:
    """Return the tensor storages of a packed file by the decoder block that uses each one."""
    block_memories = _BlockMemories(planned, weights)
    for number, group in weights.groups():
        group_memories: dict[int, None] = {}

        def record(memory: int, memories: dict[int, None] = group_memories) -> torch.Tensor:
            memories[memory] = None
            return memory_of(memory)

        # Build the states only to record which memories they use.
        states_of(file.facts.states, number, group, record)
        block_memories.add(number, group_memories)
    return block_memories
