"""Groups of layers that get their weights together, and their states before and after.

A layer is kept as it was built, on the meta device, so that its weights can come any number of
times: when a checkpoint is loaded, and whenever they are renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree

from interposer import PluggableLayer
from interposer.errors import CheckpointError
from interposer_models._checkpoint.row_room import RowRoom
from interposer_models._checkpoint.tensor_places import Copy, TensorPlace, plain_copy
from interposer_ops.devices import host_memory

State = dict[str, Any]
"""Attributes of a layer by name, without what every module has besides its parameters."""

C = TypeVar("C")
L = TypeVar("L", bound=nn.Module)

# Hooks, submodules and the like are the model's, not part of what its weights decide.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


class LayerGroup:
    """Layers that share a parameter, mostly just one: filled and finalized together.

    Attributes:
        layers: in the order of the model.
        places: where each of the tensors goes, by the name that checkpoints use.
    """

    def __init__(
        self, layers: Iterable[PluggableLayer], places: Iterable[tuple[str, TensorPlace]]
    ) -> None:
        self.layers = tuple(layers)
        self.places = dict(places)
        self._built = [_mapped(state_of(layer), {}) for layer in self.layers]

    def states(self, parameters: dict[int, nn.Parameter]) -> list[State]:
        """Return what each layer held when it was built, with these parameters instead.

        Args:
            parameters: by the ``id`` of the one that each replaces, wherever it is referred to.
        """
        return [_mapped(built, parameters) for built in self._built]

    def finalize(self, filling: Filling) -> None:
        """Take over the weights and prepare for inference."""
        for layer, state in zip(self.layers, self._filled(filling), strict=True):
            vars(layer).update(state)
        # The last ones first: a head gives the table up that its embedding shares before that packs
        # it, so that the plain one is not held besides.
        for layer in reversed(self.layers):
            layer.finalize()

    def changed(self, changes: Callable[[State, State], C]) -> list[C]:
        """Return what ``changes`` makes of each layer: the state it was built in, and its own."""
        pairs = zip(self.states({}), self.layers, strict=True)
        return [changes(built, state_of(layer)) for built, layer in pairs]

    def take(self, states: Iterable[State]) -> None:
        """Let the layers hold states that they had before, when they were finalized."""
        for layer, state in zip(self.layers, states, strict=True):
            vars(layer).update(state)

    def finalized(self, filling: Filling) -> list[State]:
        """Return what each layer would hold with these weights; nothing is changed."""
        copies = [_copied(*pair) for pair in zip(self.layers, self._filled(filling), strict=True)]
        for copy in reversed(copies):
            copy.finalize()
        return [state_of(copy) for copy in copies]

    def _filled(self, filling: Filling) -> Iterator[State]:
        """Yield the states with the parameters of ``filling``, which loses them.

        Nobody but the layer refers to them then, so that they go when it drops them.
        """
        states = self.states(filling.parameters)
        filling.parameters.clear()
        while states:
            yield states.pop(0)

    def reset(self) -> None:
        """Go back to the meta device, as the layers were built."""
        for layer, state in zip(self.layers, self.states({}), strict=True):
            for name in state_of(layer).keys() - state.keys():
                del vars(layer)[name]
            vars(layer).update(state)


class Filling:
    """The parameters of a group in memory, as far as their tensors have come.

    Attributes:
        parameters: by the ``id`` of the one on the meta device.
        missing: names of the tensors that have not come.
        borrows: whether tensors stay as they are until the group is finalized, so that those need
            no copy which nothing is kept of.
        is_left: whether what the group keeps is copied when it is finalized, so that no tensor that
            it borrows needs a copy.
        refusal: the error for a tensor that is not finite. The layers are finalized before it is
            raised, as their own checks know more about the tensor.
    """

    refusal: CheckpointError | None = None

    def __init__(
        self, group: LayerGroup, device: str, borrows: bool = False, is_left: bool = False
    ) -> None:
        self.group = group
        self.borrows = borrows
        self.is_left = is_left
        self.missing = set(group.places)
        self._begun: set[str] = set()
        self.parameters: dict[int, nn.Parameter] = {}
        for place in group.places.values():
            if id(place.parameter) not in self.parameters:
                self.parameters[id(place.parameter)] = _allocated(place.parameter, device)

    def put(
        self,
        name: str,
        tensor: torch.Tensor,
        path: object,
        is_given: bool = False,
        copy: Copy = plain_copy,
    ) -> bool | None:
        """Copy a tensor to its place, or let it stand there.

        Args:
            is_given: it lies in memory that nobody else has, so that it needs no copy.
        Returns: whether ``copy`` found all numbers finite; None where nothing was copied by it.
        Raises: CheckpointError: it came before, or has the wrong shape or kind of dtype.
        """
        if name not in self.missing or name in self._begun:
            raise CheckpointError(path, f"holds the tensor {name!r} twice")
        place = self.group.places[name]
        tensor = place.share(name, tensor, path)
        memory = self.parameters[id(place.parameter)]
        is_finite: bool | None = None
        if place.takes_any_form:
            held = nn.Parameter(tensor.to(memory.device, copy=True), requires_grad=False)
            self.parameters[id(place.parameter)] = held
        elif (self.borrows or is_given) and place.can_borrow(
            tensor, memory.data, self.is_left or is_given
        ):
            borrowed = nn.Parameter(tensor, requires_grad=False)
            borrowed.__dict__.update(place.parameter.__dict__)
            self.parameters[id(place.parameter)] = borrowed
        else:
            is_finite = place.write(name, tensor, memory.data, path, copy)
        self.missing.remove(name)
        return is_finite

    def values(self, name: str) -> torch.Tensor:
        """Return the values that came for a tensor, where they lie."""
        place = self.group.places[name]
        whole = self.parameters[id(place.parameter)].data
        return whole if place.takes_any_form else place.stored(whole)

    def room(self, name: str) -> RowRoom | None:
        """Return the room for a tensor that its place takes by rows; None if it came before."""
        if name not in self.missing or name in self._begun:
            return None
        self._begun.add(name)
        place = self.group.places[name]
        return RowRoom.of(place, self.parameters[id(place.parameter)].data)

    def fill(self, name: str) -> None:
        """Take note that all rows of a tensor have come."""
        self.missing.remove(name)

    def awaits(self, names: Collection[str] | None) -> bool:
        """Return True if a missing tensor may still come; ``names`` are all to come, None: any."""
        places = self.group.places
        return any(
            names is None or name in names or not places[name].is_optional for name in self.missing
        )

    def put_defaults(self) -> None:
        """Fill what is missing and has a default."""
        for name in sorted(self.missing):
            place = self.group.places[name]
            if place.is_optional:
                place.write_default(self.parameters[id(place.parameter)].data)
                self.missing.remove(name)


def groups_of(layers: Iterable[PluggableLayer], places: dict[str, TensorPlace]) -> list[LayerGroup]:
    """Return the groups of layers that share parameters, in the order of their first layers."""
    members: dict[int, list[PluggableLayer]] = {}  # by the id of the group's first layer
    owners: dict[int, int] = {}
    for layer in layers:
        keys = {id(p) for p in layer._parameters.values() if p is not None}
        first, *others = sorted({owners[key] for key in keys if key in owners}) or [id(layer)]
        members.setdefault(first, []).append(layer)
        for other in others:
            members[first] += members.pop(other)
        owners |= dict.fromkeys(keys, first)
        if others:  # seldom, and all owners are looked at
            owners |= {key: first for key, owner in owners.items() if owner in others}
    listed: dict[int, list[tuple[str, TensorPlace]]] = {first: [] for first in members}
    for name, place in places.items():
        listed[owners[id(place.parameter)]].append((name, place))
    return [LayerGroup(each, listed[first]) for first, each in members.items()]


def state_of(layer: nn.Module) -> State:
    """Return what a layer holds now."""
    return {name: held for name, held in vars(layer).items() if name not in _OF_EVERY_MODULE}


def _mapped(state: State, parameters: dict[int, nn.Parameter]) -> State:
    """Return a state with containers of its own and some parameters replaced."""

    def replaced(held: object) -> object:
        return parameters.get(id(held), held)

    def mapped(held: Any) -> Any:
        # Most is in no container, or in one of these, which a tree takes ten times as long to see.
        kind = type(held)
        if kind is dict:
            return {key: mapped(value) for key, value in held.items()}
        if kind is list or kind is tuple:
            return kind(map(mapped, held))
        if isinstance(held, tuple) and hasattr(kind, "_make"):  # a named one
            return kind._make(map(mapped, held))
        if kind in _pytree.SUPPORTED_NODES or isinstance(held, tuple):
            return _pytree.tree_map(replaced, held)
        return replaced(held)

    return {name: mapped(held) for name, held in state.items()}


def _copied(layer: L, state: State) -> L:
    """Return another layer of the same class that shares no mutable state with this one."""
    copy = object.__new__(type(layer))
    vars(copy).update(_mapped(vars(layer), {}), **state)
    return copy


def _allocated(parameter: nn.Parameter, device: str) -> nn.Parameter:
    # Of a tensor without memory, empty_like would first import half a second of torch's compiler.
    if torch.device(device).type == "cpu":
        empty = host_memory.empty(parameter.shape, parameter.dtype)
    else:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    memory = nn.Parameter(empty, requires_grad=False)
    memory.__dict__.update(parameter.__dict__)
    return memory
