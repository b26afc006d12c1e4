"""Groups of layers that are loaded together, and the states of layers before and after loading.

Each layer keeps the state in which it was built, on the meta device, so that weights can be loaded
any number of times: from a checkpoint, and for every update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree

from interposer import PluggableLayer
from interposer.errors import CheckpointError
from interposer_engine._checkpoint.tensors import Copy, TensorPlace, plain_copy
from interposer_ops.devices import host_memory
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.tensor_parallel.sharding import Slice


@dataclass(frozen=True, slots=True, eq=False)
class RowBuffer:
    """Memory for this rank's shard of a stored tensor, written row by row.

    Rows are entries of the first dimension of the stored tensor.

    Attributes:
        entries: the memory of the shard, as a view in the layout of the stored tensor.
        dim: dimension of the stored tensor that ``slice`` divides.
        slice: the shard of this rank; None if the tensor is replicated.
    """

    entries: torch.Tensor
    dim: int
    slice: Slice | None

    @classmethod
    def of(cls, place: TensorPlace, parameter_data: torch.Tensor) -> RowBuffer:
        """Return a row buffer in the parameter's memory, for the tensor of ``place``."""
        dim = 0 if place.slice is None else place.stored_dim(place.slice.dim)
        return cls(place.stored(parameter_data), dim, place.slice)

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory for stored rows ``start`` to ``stop``.

        Returns: None unless the rows are contiguous and belong to this rank entirely.
        """
        if self.slice is not None:
            if self.dim:
                return None  # this rank has a part of each row
            containing = [
                (offset, lower)
                for offset, lower, upper in self._ranges()
                if lower <= start and stop <= upper
            ]
            if not containing:
                return None
            offset, lower = containing[0]
            start, stop = offset + start - lower, offset + stop - lower
        rows = self.entries[start:stop]
        return rows if rows.is_contiguous() else None

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Copy this rank's part of the given rows, the first of which is row ``start``."""
        stop = start + len(rows)
        if self.slice is None:
            self.entries[start:stop].copy_(rows)
        elif self.dim:
            # Sharded along columns: every row has a part for this rank.
            self.entries[start:stop].copy_(self.slice.of(rows, self.dim))
        else:
            for offset, lower, upper in self._ranges():
                first, last = max(start, lower), min(stop, upper)
                if first < last:
                    target = self.entries[offset + first - lower : offset + last - lower]
                    target.copy_(rows[first - start : last - start])

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(offset in entries, first stored row, last stored row + 1)`` of each shard."""
        assert self.slice is not None
        ranges, offset = [], 0
        for lower, upper in self.slice.ranges:
            ranges.append((offset, lower, upper))
            offset += upper - lower
        return ranges


State = dict[str, Any]
"""Attributes of a layer by name: parameters, buffers, and those that not every module has."""

C = TypeVar("C")
L = TypeVar("L", bound=nn.Module)

# Hooks, submodules and the like do not depend on the weights.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


class LayerGroup:
    """Layers that share a parameter, or one layer alone: loaded and finalized together.

    Attributes:
        layers: the layers, in the order of the model.
        places: the place of each tensor, by its name in checkpoints.
    """

    def __init__(
        self, layers: Iterable[PluggableLayer], places: Iterable[tuple[str, TensorPlace]]
    ) -> None:
        self.layers = tuple(layers)
        self.places = dict(places)
        # A copy: finalizing replaces attributes and changes containers of the layer.
        self._built = [_copy_state(state_of(layer), {}) for layer in self.layers]

    def states(self, parameters: dict[int, nn.Parameter]) -> list[State]:
        """Return the state in which each layer was built, with replacements for some parameters.

        Args:
            parameters: replacements, by the ``id`` of the parameter that each replaces everywhere.
        """
        return [_copy_state(built, parameters) for built in self._built]

    def finalize(self, pending: PendingWeights) -> None:
        """Move the weights into the layers, and finalize the layers for inference."""
        for layer, state in zip(self.layers, self._filled_states(pending), strict=True):
            vars(layer).update(state)
        # Last layer first: a tied head releases the table before the embedding packs it, so that
        # the plain table is not kept next to the packed one.
        for layer in reversed(self.layers):
            layer.finalize()

    def compare_states(self, compare: Callable[[State, State], C]) -> list[C]:
        """Return ``compare(built state, current state)`` for each layer."""
        pairs = zip(self.states({}), self.layers, strict=True)
        return [compare(built, state_of(layer)) for built, layer in pairs]

    def set_states(self, states: Iterable[State]) -> None:
        """Set the layers to states that were recorded after an earlier ``finalize``."""
        Linear.count_exchange()
        for layer, state in zip(self.layers, states, strict=True):
            vars(layer).update(state)

    def finalized_states(self, pending: PendingWeights) -> list[State]:
        """Return the finalized state of each layer with new weights; the layers stay unchanged."""
        copies = [
            _copy_with_state(*pair)
            for pair in zip(self.layers, self._filled_states(pending), strict=True)
        ]
        for layer_copy in reversed(copies):
            layer_copy.finalize()
        return [state_of(layer_copy) for layer_copy in copies]

    def _filled_states(self, pending: PendingWeights) -> Iterator[State]:
        """Yield each layer's built state with the parameters of ``pending``; clear ``pending``.

        Only the layer refers to its parameters then, so that their memory is freed when the layer
        drops them.
        """
        states = self.states(pending.parameters)
        # ``states`` must hold the only references, so that each state is freed after its layer.
        pending.parameters.clear()
        while states:
            yield states.pop(0)

    def reset(self) -> None:
        """Return the layers to their state after construction, on the meta device."""
        Linear.count_exchange()
        for layer, state in zip(self.layers, self.states({}), strict=True):
            # Attributes that finalizing has added.
            for name in state_of(layer).keys() - state.keys():
                del vars(layer)[name]
            vars(layer).update(state)


class PendingWeights:
    """Parameters of a layer group while tensors arrive from a checkpoint.

    Attributes:
        parameters: the parameters, by the ``id`` of the parameter on the meta device.
        missing: names of the tensors that have not arrived.
        can_borrow: stored tensors stay unchanged until the group is finalized. A parameter can then
            use a stored tensor instead of a copy, if the finalized layer keeps nothing of it.
        is_result_copied: the finalized group's tensors are copied, so that no
            borrowed tensor needs a copy.
        refusal: the error for a tensor that is not finite. Layers are finalized before it is
            raised, because their own checks describe the tensor more precisely.
    """

    refusal: CheckpointError | None = None

    def __init__(
        self,
        group: LayerGroup,
        device: str,
        can_borrow: bool = False,
        is_result_copied: bool = False,
    ) -> None:
        self.group = group
        self.can_borrow = can_borrow
        self.is_result_copied = is_result_copied
        self.missing = set(group.places)
        self._begun: set[str] = set()
        self.parameters: dict[int, nn.Parameter] = {}
        for place in group.places.values():
            if id(place.parameter) not in self.parameters:
                self.parameters[id(place.parameter)] = _allocate(place.parameter, device)

    def put(
        self,
        name: str,
        tensor: torch.Tensor,
        path: object,
        is_exclusive: bool = False,
        copy: Copy = plain_copy,
    ) -> bool | None:
        """Copy a tensor to its place in the parameter, or use the tensor itself as the parameter.

        Args:
            is_exclusive: nothing else uses the tensor's memory, so that no copy is necessary.
        Returns: the result of ``copy``, which says whether all numbers are finite; None if ``copy``
            was not called.
        Raises: CheckpointError: the tensor arrives twice, or has the wrong shape or kind of dtype.
        """
        if name not in self.missing or name in self._begun:
            raise CheckpointError(path, f"holds the tensor {name!r} twice")
        place = self.group.places[name]
        tensor = place.shard(name, tensor, path)
        memory = self.parameters[id(place.parameter)]
        is_finite: bool | None = None
        if place.takes_any_form:
            parameter = nn.Parameter(tensor.to(memory.device, copy=True), requires_grad=False)
            self.parameters[id(place.parameter)] = parameter
        elif (self.can_borrow or is_exclusive) and place.can_borrow(
            tensor, memory.data, self.is_result_copied or is_exclusive
        ):
            # Attributes such as ``stored_as`` lie in the parameter's ``__dict__``.
            borrowed = nn.Parameter(tensor, requires_grad=False)
            borrowed.__dict__.update(place.parameter.__dict__)
            self.parameters[id(place.parameter)] = borrowed
        else:
            is_finite = place.write(name, tensor, memory.data, path, copy)
        self.missing.remove(name)
        return is_finite

    def values(self, name: str) -> torch.Tensor:
        """Return the values of a tensor that has arrived, as a view of its parameter."""
        place = self.group.places[name]
        data = self.parameters[id(place.parameter)].data
        return data if place.takes_any_form else place.stored(data)

    def row_buffer(self, name: str) -> RowBuffer | None:
        """Return a buffer for a tensor that arrives by rows; None if the tensor arrived before."""
        if name not in self.missing or name in self._begun:
            return None
        self._begun.add(name)
        place = self.group.places[name]
        return RowBuffer.of(place, self.parameters[id(place.parameter)].data)

    def mark_complete(self, name: str) -> None:
        """Record that all rows of a tensor have arrived."""
        self.missing.remove(name)

    def awaits(self, names: Collection[str] | None) -> bool:
        """Return whether the group is still incomplete because a tensor is missing.

        Args:
            names: names of all tensors that will arrive; None if unknown.
        """
        places = self.group.places
        return any(
            names is None or name in names or not places[name].is_optional for name in self.missing
        )

    def write_defaults(self) -> None:
        """Fill missing optional tensors with default values."""
        for name in sorted(self.missing):
            place = self.group.places[name]
            if place.is_optional:
                place.write_default(self.parameters[id(place.parameter)].data)
                self.missing.remove(name)


def groups_of(layers: Iterable[PluggableLayer], places: dict[str, TensorPlace]) -> list[LayerGroup]:
    """Return the groups of layers that share parameters, ordered by first layer."""
    members: dict[int, list[PluggableLayer]] = {}  # by the id of the group's first layer
    owners: dict[int, int] = {}
    for layer in layers:
        keys = {id(p) for p in layer._parameters.values() if p is not None}
        # A layer that shares parameters with several groups merges these groups.
        first, *merged = sorted({owners[key] for key in keys if key in owners}) or [id(layer)]
        members.setdefault(first, []).append(layer)
        for merged_group in merged:
            members[first] += members.pop(merged_group)
        owners |= dict.fromkeys(keys, first)
        if merged:  # rare, because it visits all owners
            owners |= {key: first for key, owner in owners.items() if owner in merged}
    places_by_group: dict[int, list[tuple[str, TensorPlace]]] = {first: [] for first in members}
    for name, place in places.items():
        places_by_group[owners[id(place.parameter)]].append((name, place))
    return [LayerGroup(group, places_by_group[first]) for first, group in members.items()]


def state_of(layer: nn.Module) -> State:
    """Return the current state of a layer: its attributes, parameters and buffers."""
    return {name: value for name, value in vars(layer).items() if name not in _OF_EVERY_MODULE}


def _copy_state(state: State, parameters: dict[int, nn.Parameter]) -> State:
    """Copy a layer state with all containers in it, replacing some parameters."""

    def replaced(value: object) -> object:
        return parameters.get(id(value), value)

    def mapped(value: Any) -> Any:
        # tree_map takes ten times as long as these checks, which handle most values.
        kind = type(value)
        if kind is dict:
            return {key: mapped(member) for key, member in value.items()}
        if kind is list or kind is tuple:
            return kind(map(mapped, value))
        if isinstance(value, tuple) and hasattr(kind, "_make"):  # a named tuple
            return kind._make(map(mapped, value))
        if kind in _pytree.SUPPORTED_NODES or isinstance(value, tuple):
            return _pytree.tree_map(replaced, value)
        return replaced(value)

    return {name: mapped(value) for name, value in state.items()}


def _copy_with_state(layer: L, state: State) -> L:
    """Return a copy of a layer in another state; copy and original share no mutable state."""
    # copy.copy would share containers such as ``_modules`` with the layer.
    layer_copy = object.__new__(type(layer))
    vars(layer_copy).update(_copy_state(vars(layer), {}), **state)
    return layer_copy


def _allocate(parameter: nn.Parameter, device: str) -> nn.Parameter:
    # empty_like of a meta tensor would first import torch's compiler, which takes half a second.
    if torch.device(device).type == "cpu":
        empty = host_memory.empty(parameter.shape, parameter.dtype)
    else:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    memory = nn.Parameter(empty, requires_grad=False)
    memory.__dict__.update(parameter.__dict__)
    return memory
