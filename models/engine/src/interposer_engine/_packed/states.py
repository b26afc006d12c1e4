"""Conversion of finalized layers' states to plain data and back.

A layer's attributes after finalizing are tensors, functions of kernels, and settings that the layer
had before loading. A tensor is recorded by the number of a memory in the file. An
object that the layer had before is recorded by its path from the layer. A copy of such a layer is
recorded by the path of the original and the differences. The data contain and name no code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn

from interposer import Site
from interposer_engine._checkpoint.layers import LayerGroup, State, state_of
from interposer_engine._packed.header_check import check_view, dtype_of
from interposer_ops.quantized_linear import CodedProduct, StaticProduct

Data: TypeAlias = list[Any]
Keep: TypeAlias = Callable[[torch.Tensor], int]
"""Stores the complete memory of a tensor as uint8; returns the number of the memory in the file."""

_PRODUCTS = {kind.__name__: kind for kind in (CodedProduct, StaticProduct)}
_PLAIN = (bool, int, float, str)
_MAX_STEPS = 6  # from a layer to the function of a kernel that a method of a method has bound


class UnpackableError(Exception):
    """A layer holds a value that a packed file cannot store; the text names the value."""


class StateWriter:
    """Converts the state of a finalized layer to plain data."""

    def __init__(self, built: State, keep: Keep, device: str = "cpu") -> None:
        """Prepare to compare a layer's state with its state after construction.

        Args:
            built: the state in which the layer was built.
            keep: stores the memory of a tensor.
            device: the device on which all tensors must be.
        """
        self._built = built
        self._keep = keep
        self._device = device
        self._paths: dict[int, list[Any]] = {}
        self._walk = _reachable(built)

    def changes(self, state: State) -> dict[str, Data]:
        """Return the attributes that differ from the layer's built state, as plain data.

        Raises: UnpackableError: an attribute holds a value that no file can store.
        """
        missing = self._built.keys() - state.keys()
        if missing:
            raise UnpackableError(f"it drops {', '.join(sorted(missing))}")
        return {
            name: self._data(value)
            for name, value in state.items()
            if name not in self._built or not _same(value, self._built[name])
        }

    def _data(self, value: Any) -> Data:
        if value is None or type(value) in _PLAIN:
            return ["plain", value]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if type(value) in (tuple, list):
            return [type(value).__name__, [self._data(part) for part in value]]
        if type(value) is dict and all(type(key) is str for key in value):
            return ["dict", {key: self._data(part) for key, part in value.items()}]
        # An object that the layer had before, such as the function of a kernel.
        if (path := self._path(value)) is not None:
            return ["built", path]
        if type(value) is partial:
            parts = [value.func, value.args, value.keywords]
            return ["partial", [self._data(part) for part in parts]]
        if (name := type(value).__name__) in _PRODUCTS and type(value) is _PRODUCTS[name]:
            members = [getattr(value, field.name) for field in fields(value)]
            return ["product", [name, [self._data(part) for part in members]]]
        if type(value) is MethodType:
            return ["method", [self._data(value.__self__), value.__func__.__name__]]
        if isinstance(value, nn.Module) and (layer_copy := self._copied_layer(value)) is not None:
            return ["copy", layer_copy]
        raise UnpackableError(f"it holds {value!r:.80}, made while weights were loaded")

    def _tensor(self, tensor: torch.Tensor) -> Data:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        is_elsewhere = tensor.device.type != torch.device(self._device).type
        if not is_plain or is_elsewhere or tensor.is_quantized or tensor.is_complex():
            location = f", on {tensor.device}" if is_elsewhere else ""
            kind = f"{type(tensor).__name__}, {tensor.layout}{location}"
            raise UnpackableError(f"it holds a tensor of {kind}")
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage())
        dtype = str(tensor.dtype).removeprefix("torch.")
        form = [dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        return [
            "parameter" if type(tensor) is nn.Parameter else "tensor",
            [self._keep(memory), form],
        ]

    def _copied_layer(self, layer: nn.Module) -> list[Any] | None:
        """Return the path of the layer from which ``layer`` was copied, and the changed attributes.

        A copy shares all attributes that were not replaced, so that the original is the layer that
        shares the most.
        """
        copied_state, originals = state_of(layer), []
        for path, value in _reachable(self._built):
            if type(value) is type(layer):
                state = state_of(value)
                num_shared = sum(
                    name in state and attribute is state[name]
                    for name, attribute in copied_state.items()
                )
                originals.append((num_shared, path, state))
        if not originals:
            return None
        _, path, state = max(originals, key=lambda original: original[0])
        return [path, StateWriter(state, self._keep, self._device).changes(copied_state)]

    def _path(self, value: Any) -> list[Any] | None:
        # The walk is lazy: most values are close to the layer, and a complete walk is long.
        while id(value) not in self._paths:
            try:
                path, reached = next(self._walk)
            except StopIteration:
                return None
            self._paths[id(reached)] = path
        return self._paths[id(value)]


def restored_state(
    built: State, changes: Mapping[str, Data], tensor_of: Callable[[int], torch.Tensor]
) -> State:
    """Return the layer state that results from the data of ``StateWriter.changes``.

    Args:
        built: the state in which the layer was built.
        tensor_of: returns the memory of a number, as uint8.
    Raises: ValueError: the data belong to another layer, or are malformed.
    """
    reader = _StateReader(built, tensor_of)
    try:
        attributes = {name: reader.value(data, (name,)) for name, data in changes.items()}
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {**built, **attributes}


class _StateReader:
    def __init__(self, built: State, tensor_of: Callable[[int], torch.Tensor]) -> None:
        self._built = built
        self._tensor_of = tensor_of
        self._tensors: dict[str, torch.Tensor] = {}
        self._reachable: dict[str, Any] | None = None

    def value(self, data: Data, at: tuple[str, ...]) -> Any:
        kind, content = data
        match kind:
            case "plain":
                if content is not None and type(content) not in _PLAIN:
                    raise ValueError(f"{content!r:.80} is no plain value")
                return content
            case "tensor":
                return self._tensor(content)
            case "parameter":
                return self._parameter(content, at)
            case "dtype":
                return dtype_of(content)
            case "tuple":
                return tuple(self.value(part, at) for part in content)
            case "list":
                return [self.value(part, at) for part in content]
            case "dict":
                return {name: self.value(part, (*at, name)) for name, part in content.items()}
            case "built":
                return self._built_object(content)
            case "partial":
                function, args, keywords = (self.value(part, at) for part in content)
                return partial(function, *args, **keywords)
            case "product":
                name, members = content
                return _PRODUCTS[name](*(self.value(part, at) for part in members))
            case "method":
                owner, name = self.value(content[0], at), content[1]
                # The file must not reach anything but a method of that name.
                method = getattr(owner, name)
                if type(method) is not MethodType or method.__func__.__name__ != name:
                    raise ValueError(f"{name!r:.80} is no method of {type(owner).__name__}")
                return method
            case "copy":
                path, changes = content
                return self._copy(self._built_object(path), changes)
        raise ValueError(f"{kind!r:.80} is no kind of value")

    def _tensor(self, content: Any) -> torch.Tensor:
        key = repr(content)
        if key not in self._tensors:
            number, form = content
            memory = self._tensor_of(number)
            dtype, shape, strides, offset = form
            # torch does not check offset and size of a view on a storage that cannot grow.
            check_view(form, memory.nbytes, "a tensor")
            empty = torch.empty(0, dtype=dtype_of(dtype), device=memory.device)
            first, excess_bytes = divmod(int(memory.storage_offset()), empty.itemsize)
            if excess_bytes:
                raise ValueError(f"a memory is not aligned for {dtype}, by {excess_bytes} bytes")
            self._tensors[key] = empty.set_(
                memory.untyped_storage(), first + offset, shape, strides
            )
        return self._tensors[key]

    def _parameter(self, content: Any, at: tuple[str, ...]) -> nn.Parameter:
        parameter = nn.Parameter(self._tensor(content), requires_grad=False)
        built_value: Any = self._built
        for name in at:
            built_value = built_value.get(name) if isinstance(built_value, dict) else None
        # Restore attributes such as ``stored_as`` of the parameter at the same place.
        if isinstance(built_value, nn.Parameter):
            parameter.__dict__.update(built_value.__dict__)
        return parameter

    def _copy(self, original: Any, changes: Mapping[str, Data]) -> nn.Module:
        if not isinstance(original, nn.Module):
            raise ValueError(f"{type(original).__name__} is no layer")
        layer = copy(original)
        vars(layer).update(restored_state(state_of(original), changes, self._tensor_of))
        return layer

    def _built_object(self, path: list[Any]) -> Any:
        if self._reachable is None:
            self._reachable = {repr(path): value for path, value in _reachable(self._built)}
        return self._reachable[repr(path)]


def _same(value: Any, built: Any) -> bool:
    if value is built:
        return True
    if type(value) is not type(built):
        return False
    if isinstance(value, dict):
        return value.keys() == built.keys() and all(_same(value[key], built[key]) for key in value)
    if isinstance(value, tuple | list):  # including named tuples, which finalizing creates anew
        return len(value) == len(built) and all(map(_same, value, built))
    return type(value) in _PLAIN and bool(value == built)


def _reachable(built: State) -> Iterator[tuple[list[Any], Any]]:
    """Yield ``(path, object)`` for each object in a built state; paths list names and indices."""
    queue = deque([([name], value) for name, value in built.items()])
    visited_ids: set[int] = set()
    while queue:
        path, value = queue.popleft()
        if (
            id(value) in visited_ids
            or value is None
            or isinstance(value, (*_PLAIN, torch.Tensor, Site))
        ):
            continue
        visited_ids.add(id(value))
        yield path, value
        # Breadth first, so that each object gets its shortest path.
        if len(path) < _MAX_STEPS:
            queue += [([*path, name], part) for name, part in _members(value)]


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from ((key, part) for key, part in value.items() if type(key) is str)
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif isinstance(value, nn.Module | type):
        return  # other layers and classes have states of their own
    elif is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        yield from getattr(value, "__dict__", {}).items()


GroupData = dict[str, list[dict[str, Any]]]
"""Each layer's changes to the state in which it was built, by the number of its group."""


def keep_states(
    states: GroupData, number: int, group: LayerGroup, hold: Keep, device: str = "cpu"
) -> None:
    """Record the states of a finalized layer group in ``states``.

    Args:
        hold: stores a memory, uint8 on ``device``, and returns a number. Called once for each
            memory of the group.
    Raises: UnpackableError: a layer holds a value that no file can store.
    """
    numbers: dict[int, int] = {}  # by address, as tensors of a group may share memory

    def number_of(memory: torch.Tensor) -> int:
        address = memory.data_ptr()
        # Empty tensors all have the address 0, but are different memories.
        if address not in numbers or not address:
            numbers[address] = hold(memory)
        return numbers[address]

    def changes(built: State, state: State) -> dict[str, Any]:
        try:
            return StateWriter(built, number_of, device).changes(state)
        except UnpackableError as error:
            raise UnpackableError(f"{state.get('prefix')}: {error}") from None

    states[str(number)] = group.compare_states(changes)


def group_states(
    states: GroupData, number: int, group: LayerGroup, memory_of: Callable[[int], torch.Tensor]
) -> list[State]:
    """Return the recorded states of a layer group, with tensors in storages of ``memory_of``.

    Raises: KeyError, ValueError, TypeError: the states belong to another model.
    """
    pairs = zip(group.states({}), states[str(number)], strict=True)
    return [restored_state(*pair, memory_of) for pair in pairs]


def expert_memories(changes: Mapping[str, Data], num_experts: int) -> dict[int, int | None]:
    """Return the expert of each tensor storage by its number; None for a shared storage.

    A sequence of ``num_experts`` members in the layer's state has one member for each expert.

    Args:
        changes: the state of one layer, as ``StateWriter.changes`` returns it.
    """
    experts: dict[int, int | None] = {}
    for data in changes.values():
        experts.update(_walked(data, num_experts, None))
    return experts


def _walked(data: Data, num_experts: int, expert: int | None) -> Iterator[tuple[int, int | None]]:
    kind, content = data
    parts: list[Any] = []
    match kind:
        case "tensor" | "parameter":
            yield content[0], expert
        case "tuple" | "list":
            # The outermost such sequence counts; deeper ones belong to one expert.
            if expert is None and len(content) == num_experts:
                for number, part in enumerate(content):
                    yield from _walked(part, num_experts, number)
            else:
                parts = content
        case "dict":
            parts = [*content.values()]
        case "partial":
            parts = content
        case "product":
            parts = content[1]
        case "method":
            parts = content[:1]
        case "copy":
            parts = [*content[1].values()]
    for part in parts:
        yield from _walked(part, num_experts, expert)
