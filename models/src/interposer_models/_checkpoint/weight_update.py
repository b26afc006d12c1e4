"""Replaces a layer's tensors by new weights, in place if possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch

from interposer_models._checkpoint.layer_group import LayerGroup, State
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
    """The prepared update of one group, which ``apply`` makes.

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
        """Make the update. A second call has no further effect."""
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
    """Return the storages whose memory is swapped, and the pairs whose content is copied.

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
    """Say whether the tensor uses the complete storage."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _differ_in_content_only(current: Any, new: Any, pairs: list[Pair]) -> bool:
    """Say whether two values differ at most in tensor content, and collect the tensors."""
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
    """Say whether the new tensors alias each other exactly as the current ones do."""
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
