"""Updates of loaded layers: replacing tensors by new weights, in place if possible.

``Offer`` is a source of new weights, ``GroupUpdate`` the prepared update of one group of layers,
and ``ExpertMove`` the update after a new placement of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType, TracebackType
from typing import Any, Protocol, Self

import torch

from interposer_engine._checkpoint.layers import LayerGroup, PendingWeights, State
from interposer_engine._checkpoint.tensors import ExpertNames, TensorPlace
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.placement import ExpertPlacement
from interposer_ops.layers.moe.sharded_experts import ExpertParallelExperts
from interposer_ops.quantized_linear import CodedProduct

Pair = tuple[torch.Tensor, torch.Tensor]
Memories = tuple[torch.UntypedStorage, torch.UntypedStorage, int]

_MIN_SWAPPED_BYTES = 1 << 16  # smaller tensors are copied
# An undocumented method of torch. Without it, all tensors are copied.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# Types whose equal instances are interchangeable.
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, MethodType, CodedProduct)


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """The prepared update of one layer group, which ``apply`` carries out.

    Attributes:
        pairs: ``(current tensor, new tensor)``, to copy content between; None if the new state
            differs in form, so that the attributes of the layers are replaced.
        memories: ``(current storage, new storage, address of the new memory)`` of tensors that are
            swapped instead of copied.
    """

    group: LayerGroup
    states: list[State]
    pairs: list[Pair] | None
    memories: list[Memories] = field(default_factory=list)

    @classmethod
    def of(cls, group: LayerGroup, states: list[State]) -> GroupUpdate:
        """Prepare the update of ``group`` to ``states``, in place if possible."""
        pairs: list[Pair] = []
        for layer, state in zip(group.layers, states, strict=True):
            current = {name: vars(layer).get(name) for name in state}
            if not _differ_in_content_only(current, state, pairs):
                return cls(group, states, None)
        # Copying between tensors that alias differently would overwrite new values.
        if not _alias_alike(pairs):
            return cls(group, states, None)
        memories, copied_pairs = _split_swapped([*_distinct(pairs)])
        return cls(group, states, copied_pairs, memories)

    def apply(self) -> None:
        """Replace the group's weights; further calls do nothing."""
        Linear.count_exchange()
        if self.pairs is None:
            for layer, state in zip(self.group.layers, self.states, strict=True):
                vars(layer).update(state)
            return
        for current, new in self.pairs:
            current.copy_(new)
        for storage, new_storage, address in self.memories:
            if storage.data_ptr() != address:  # not swapped by an earlier, interrupted call
                storage._swap_data_ptr_(new_storage)  # type: ignore[attr-defined]


def _split_swapped(pairs: list[Pair]) -> tuple[list[Memories], list[Pair]]:
    """Return the storages whose memory is swapped, and the tensor pairs whose content is copied.

    Copying a large weight takes as long as packing. Tensors and views of a swapped storage
    see the new weights. Raw addresses do not: host kernels request them in each call, but graphs of
    other devices keep them, so that only host memory is swapped.
    """
    memories: dict[int, Memories] = {}
    for current, new in pairs:
        is_plain = current.device.type == "cpu" and current.layout is torch.strided
        is_worthwhile = current.nbytes >= _MIN_SWAPPED_BYTES and _CAN_SWAP
        if is_plain and is_worthwhile and _fills_storage(current) and _fills_storage(new):
            storages = current.untyped_storage(), new.untyped_storage()
            memories[_memory(current)] = (*storages, storages[1].data_ptr())
    # Other views of a swapped storage need no copy.
    return [*memories.values()], [pair for pair in pairs if _memory(pair[0]) not in memories]


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _differ_in_content_only(current: Any, new: Any, pairs: list[Pair]) -> bool:
    """Return whether two states differ only in tensor content, and collect the pairs of tensors."""
    if current is new:
        return True
    if type(current) is not type(new):
        return False
    if isinstance(current, torch.Tensor):
        pairs.append((current, new))
        return _same_form(current, new)
    if isinstance(current, dict):
        return list(current) == list(new) and _differ_in_content_only(
            [*current.values()], [*new.values()], pairs
        )
    if isinstance(current, list | tuple):
        return len(current) == len(new) and all(
            _differ_in_content_only(*pair, pairs) for pair in zip(current, new, strict=True)
        )
    if isinstance(current, partial):
        return all(
            _differ_in_content_only(getattr(current, name), getattr(new, name), pairs)
            for name in ("func", "args", "keywords")
        )
    return isinstance(current, _PLAIN) and bool(current == new)


def _same_form(current: torch.Tensor, new: torch.Tensor) -> bool:
    is_same = (current.shape, current.dtype, current.device, current.layout) == (
        (new.shape, new.dtype, new.device, new.layout)
    )
    if not is_same or current.layout is not torch.strided:
        return is_same
    # Expanded entries share memory, which cannot be written through them.
    return (current.stride(), current.storage_offset()) == (
        new.stride(),
        new.storage_offset(),
    ) and all(
        stride or size <= 1 for stride, size in zip(current.stride(), current.shape, strict=True)
    )


def _alias_alike(pairs: list[Pair]) -> bool:
    """Say whether the new tensors share memory with each other exactly as the current ones do."""
    new_by_old: dict[int, int] = {}
    old_by_new: dict[int, int] = {}
    for current, new in pairs:
        if current.numel():
            old_key, new_key = _memory(current), _memory(new)
            if new_by_old.setdefault(old_key, new_key) != new_key:
                return False
            if old_by_new.setdefault(new_key, old_key) != old_key:
                return False
    return True


def _memory(tensor: torch.Tensor) -> int:
    # Tensors of other layouts have no storage with an address.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _distinct(pairs: list[Pair]) -> Iterator[Pair]:
    visited_ids: set[int] = set()
    for current, new in pairs:
        if id(current) not in visited_ids:
            visited_ids.add(id(current))
            yield current, new


class TensorBuffer(Protocol):
    """Interface to model memory for one tensor that arrives some rows at a time."""

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return memory for the rows ``start`` to ``stop``; None if only ``put`` can store rows."""
        ...

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Copy rows to the tensor from row ``start`` on, or this rank's part of the rows."""
        ...


BufferFor = Callable[[str, Sequence[int], torch.dtype], TensorBuffer | None]
"""Returns the buffer for a tensor of a given name, shape and dtype; None if the tensor must arrive
complete."""


class Offer:
    """New weights that a caller offers to ``Weights.update``.

    The offer is a context manager that is open while weights are updated. A subclass for another
    source learns in ``__exit__`` how the update ended, and can prevent it in ``confirm``.

    Attributes:
        keeps_memory: whether the memory of replaced weights is kept for the next update.
    """

    keeps_memory: bool = False

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor | TensorBuffer]]) -> None:
        self._tensors = tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the update; ``error`` is the reason for a failure."""

    def tensors(self, buffer_for: BufferFor) -> Iterator[tuple[str, torch.Tensor | TensorBuffer]]:
        """Yield names and tensors; the next request may overwrite the memory of the last tensor.

        Args:
            buffer_for: returns model memory for a tensor that is about to arrive. If it returned a
                buffer, the full buffer is yielded instead of the tensor.
        """
        return iter(self._tensors)

    def is_exclusive(self, tensor: torch.Tensor) -> bool:
        """Say whether the model may keep the tensor's memory, as nothing else uses it."""
        return False

    def confirm(self) -> None:
        """Return if the prepared weights may replace the current weights; raise otherwise."""


Places = dict[str, TensorPlace]


class ExpertMove:
    """Collects the new experts of one layer, and installs all of them in ``finish``.

    Groups of experts that stay on this rank are not read again.

    Attributes:
        names: names of the tensors to read, as in the checkpoint.
    """

    def __init__(
        self,
        layer: ExpertParallelExperts,
        placement: ExpertPlacement,
        groups: Iterable[LayerGroup],
        names: ExpertNames,
    ) -> None:
        self._layer, self._placement, self._names = layer, placement, names
        prefix = f"{layer.prefix}."
        layer_groups = [
            group
            for group in groups
            if any(member is layer or member.prefix.startswith(prefix) for member in group.layers)
        ]
        local_places = {group: self._local(group) for group in layer_groups}
        placement_before = layer.routes.placement
        # Stored names and slices follow from the placement: set the new one to compute them.
        layer.routes.placement = placement
        try:
            places_after = {group: self._stored(places) for group, places in local_places.items()}
        finally:
            layer.routes.placement = placement_before
        self._places = {
            group: places for group, places in places_after.items() if _differ(places, group.places)
        }
        self._owners = {name: group for group, places in self._places.items() for name in places}
        self.names = self._owners.keys()
        self._pending: dict[LayerGroup, PendingWeights] = {}
        self._updates: dict[LayerGroup, GroupUpdate] = {}

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that have not arrived yet."""
        pending = self._pending
        return [
            name
            for group in self._places.keys() - self._updates.keys()
            for name in (pending[group].missing if group in pending else self._places[group])
        ]

    @property
    def is_complete(self) -> bool:
        """Say whether all tensors have arrived."""
        return len(self._updates) == len(self._places)

    def put(
        self,
        name: str,
        tensor: torch.Tensor,
        device: str,
        path: object,
        names: Collection[str] | None,
    ) -> None:
        """Store a tensor; once all tensors have arrived, prepare the layer group.

        Args:
            names: names of all tensors that will arrive, if known.
        Raises: CheckpointError: the tensor arrives twice, or has the wrong shape or kind of dtype.
        """
        group = self._owners[name]
        pending = self._pending.get(group)
        if pending is None:
            # The group keeps its old places until ``finish``.
            moved_group = copy(group)
            moved_group.places = self._places[group]
            pending = self._pending[group] = PendingWeights(moved_group, device, True)
        pending.put(name, tensor, path)
        if not pending.awaits(names):
            pending.write_defaults()
            self._updates[group] = GroupUpdate.of(group, group.finalized_states(pending))
            del self._pending[group]

    def finish(self, apply: Callable[[list[GroupUpdate]], None]) -> list[str]:
        """Put the new experts into the layer.

        Returns: prefixes of the layers whose new operands differ in form, so that objects were
            replaced instead of written in place.
        """
        updates = list(self._updates.values())
        apply(updates)
        for group, places in self._places.items():
            group.places = places
        self._layer.routes.set_placement(self._placement)
        replaced = [update for update in updates if update.pairs is None]
        return [layer.prefix for update in replaced for layer in update.group.layers]

    def _local(self, group: LayerGroup) -> Places:
        return {self._names.local(name): place for name, place in group.places.items()}

    def _stored(self, local_places: Places) -> Places:
        slices, prefix = self._layer.slices, self._layer.prefix
        places = {}
        for name, place in local_places.items():
            # Only a stacked tensor of all experts has a slice; tensors of single experts have none.
            shard = slices.get(("", name.removeprefix(f"{prefix}.")))
            is_stacked = shard is not None and place.slice is not None
            places[self._names.stored(name)] = replace(place, slice=shard) if is_stacked else place
        return places


def _differ(places: Places, previous: Places) -> bool:
    """Return whether two sets of places read different tensors, or parts of them."""
    return places.keys() != previous.keys() or any(
        (place.index, place.slice) != (previous[name].index, previous[name].slice)
        for name, place in places.items()
    )
