"""The change of a layer's tensors to those of other weights."""

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

_LEAST_BYTES = 1 << 16
# Not documented: without it, all is copied.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# Kinds of which equal ones are as good as the same one.
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, MethodType, CodedProduct)


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """The change of one group, settled but not made.

    Attributes:
        pairs: tensors that are held, each with the one whose content it gets; None where what is
            held has another form than what is to come, so that attributes are exchanged.
        memories: in place of pairs, storages that are held, each with the one that it gets the
            memory of, and the address of that.
    """

    group: LayerGroup
    states: list[State]
    pairs: list[Pair] | None
    memories: list[Memories] = field(default_factory=list)

    @classmethod
    def of(cls, group: LayerGroup, states: list[State]) -> GroupUpdate:
        """Return the change of ``group`` to ``states``, in place if possible."""
        pairs: list[Pair] = []
        for layer, state in zip(group.layers, states, strict=True):
            held = {name: vars(layer).get(name) for name in state}
            if not _alike(held, state, pairs):
                return cls(group, states, None)
        if not _alias_alike(pairs):
            return cls(group, states, None)
        memories, rest = _exchangeable([*_distinct(pairs)])
        return cls(group, states, rest, memories)

    def apply(self) -> None:
        """Make the change. Doing so twice is the same as once."""
        if self.pairs is None:
            for layer, state in zip(self.group.layers, self.states, strict=True):
                vars(layer).update(state)
            return
        for held, new in self.pairs:
            held.copy_(new)
        for storage, other, address in self.memories:
            if storage.data_ptr() != address:
                storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def _exchangeable(pairs: list[Pair]) -> tuple[list[Memories], list[Pair]]:
    """Return the memories that are exchanged, and the pairs of which the content is copied.

    Copying a large weight takes as long as packing it did. Whoever holds a tensor, or a view of
    it, has the new weights all the same. An address would be that of the old ones: on the host
    kernels ask for it in each call, while on other devices graphs keep it.
    """
    memories: dict[int, Memories] = {}
    for held, new in pairs:
        is_plain = held.device.type == "cpu" and held.layout is torch.strided
        is_worth = held.nbytes >= _LEAST_BYTES and _CAN_SWAP
        if is_plain and is_worth and _is_all(held) and _is_all(new):
            storages = held.untyped_storage(), new.untyped_storage()
            memories[_memory(held)] = (*storages, storages[1].data_ptr())
    # Views of the same memory have what it has.
    return [*memories.values()], [pair for pair in pairs if _memory(pair[0]) not in memories]


def _is_all(tensor: torch.Tensor) -> bool:
    """Say whether nothing else lies in a tensor's memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _alike(held: Any, new: Any, pairs: list[Pair]) -> bool:
    """Say whether two values differ in the content of tensors only, and add these to ``pairs``."""
    if held is new:
        return True
    if type(held) is not type(new):
        return False
    if isinstance(held, torch.Tensor):
        pairs.append((held, new))
        return _same_form(held, new)
    if isinstance(held, dict):
        return list(held) == list(new) and _alike([*held.values()], [*new.values()], pairs)
    if isinstance(held, list | tuple):
        return len(held) == len(new) and all(
            _alike(*pair, pairs) for pair in zip(held, new, strict=True)
        )
    if isinstance(held, partial):
        return all(
            _alike(getattr(held, name), getattr(new, name), pairs)
            for name in ("func", "args", "keywords")
        )
    return isinstance(held, _PLAIN) and bool(held == new)


def _same_form(held: torch.Tensor, new: torch.Tensor) -> bool:
    same = (held.shape, held.dtype, held.device, held.layout) == (
        (new.shape, new.dtype, new.device, new.layout)
    )
    if not same or held.layout is not torch.strided:
        return same
    # Expanded entries share memory, which cannot be written through them.
    return (held.stride(), held.storage_offset()) == (new.stride(), new.storage_offset()) and all(
        stride or size <= 1 for stride, size in zip(held.stride(), held.shape, strict=True)
    )


def _alias_alike(pairs: list[Pair]) -> bool:
    """Return True if new tensors alias each other exactly as the held ones do."""
    there: dict[int, int] = {}
    here: dict[int, int] = {}
    for held, new in pairs:
        if held.numel():
            old_key, new_key = _memory(held), _memory(new)
            if there.setdefault(old_key, new_key) != new_key:
                return False
            if here.setdefault(new_key, old_key) != old_key:
                return False
    return True


def _memory(tensor: torch.Tensor) -> int:
    # Packed tensors of other layouts have no storage that could be asked for.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _distinct(pairs: list[Pair]) -> Iterator[Pair]:
    seen: set[int] = set()
    for held, new in pairs:
        if id(held) not in seen:
            seen.add(id(held))
            yield held, new
