"""The states of finalized layers as plain data, and back.

What weights decide of a layer is in its attributes: tensors, and beside them functions of kernels
and settings that the layer had before it got its weights. Tensors are told by their place in a
file, what the layer had before by its path from the layer, and layers that were made as copies of
one that it had, by the path of that and what differs. No code is named or read.
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
from interposer_models._checkpoint.layer_group import State, state_of
from interposer_models._packed.header_check import check_view, dtype_of
from interposer_ops.quantized_linear import CodedProduct, StaticProduct

Data: TypeAlias = list[Any]
Keep: TypeAlias = Callable[[torch.Tensor], int]
"""Takes uint8, all of a tensor's memory, and returns its number in the file."""

_PRODUCTS = {kind.__name__: kind for kind in (CodedProduct, StaticProduct)}
_PLAIN = (bool, int, float, str)
_MOST_STEPS = 6  # from a layer to the function of a kernel that a method of a method has bound


class UnpackableError(Exception):
    """A layer holds what no file can hold; the text says what."""


class StateWriter:
    """Turns what a layer holds into data."""

    def __init__(self, built: State, keep: Keep, device: str = "cpu") -> None:
        """Begin a walk of what the layer was built with.

        Args:
            device: where tensors have to lie.
        """
        self._built = built
        self._keep = keep
        self._device = device
        self._paths: dict[int, list[Any]] = {}
        self._walk = _reachable(built)

    def changes(self, state: State) -> dict[str, Data]:
        """Return what differs from the state that the layer was built in, by attribute.

        Raises: UnpackableError: it is nothing that a file can hold.
        """
        missing = self._built.keys() - state.keys()
        if missing:
            raise UnpackableError(f"it drops {', '.join(sorted(missing))}")
        return {
            name: self._data(held)
            for name, held in state.items()
            if name not in self._built or not _same(held, self._built[name])
        }

    def _data(self, held: Any) -> Data:
        if held is None or type(held) in _PLAIN:
            return ["plain", held]
        if isinstance(held, torch.Tensor):
            return self._tensor(held)
        if isinstance(held, torch.dtype):
            return ["dtype", str(held).removeprefix("torch.")]
        if type(held) in (tuple, list):
            return [type(held).__name__, [self._data(part) for part in held]]
        if type(held) is dict and all(type(key) is str for key in held):
            return ["dict", {key: self._data(part) for key, part in held.items()}]
        if (path := self._path(held)) is not None:
            return ["built", path]
        if type(held) is partial:
            parts = [held.func, held.args, held.keywords]
            return ["partial", [self._data(part) for part in parts]]
        if (name := type(held).__name__) in _PRODUCTS and type(held) is _PRODUCTS[name]:
            members = [getattr(held, field.name) for field in fields(held)]
            return ["product", [name, [self._data(part) for part in members]]]
        if type(held) is MethodType:
            return ["method", [self._data(held.__self__), held.__func__.__name__]]
        if isinstance(held, nn.Module) and (made := self._copied(held)) is not None:
            return ["copy", made]
        raise UnpackableError(f"it holds {held!r:.80}, made while weights were loaded")

    def _tensor(self, held: torch.Tensor) -> Data:
        plain = type(held) in (torch.Tensor, nn.Parameter) and held.layout is torch.strided
        elsewhere = held.device.type != torch.device(self._device).type
        if not plain or elsewhere or held.is_quantized or held.is_complex():
            where = f", on {held.device}" if elsewhere else ""
            kind = f"{type(held).__name__}, {held.layout}{where}"
            raise UnpackableError(f"it holds a tensor of {kind}")
        memory = torch.empty(0, dtype=torch.uint8, device=held.device)
        memory.set_(held.untyped_storage())
        dtype = str(held.dtype).removeprefix("torch.")
        form = [dtype, list(held.shape), list(held.stride()), held.storage_offset()]
        return ["parameter" if type(held) is nn.Parameter else "tensor", [self._keep(memory), form]]

    def _copied(self, held: nn.Module) -> list[Any] | None:
        """Return the path of the layer that ``held`` was copied of, and what differs from it.

        Copies share what they do not replace, so that it is the one with which most is shared.
        """
        own, alike = state_of(held), []
        for path, found in _reachable(self._built):
            if type(found) is type(held):
                state = state_of(found)
                shared = [name for name in own if name in state and own[name] is state[name]]
                alike.append((len(shared), path, state))
        if not alike:
            return None
        _, path, state = max(alike, key=lambda each: each[0])
        return [path, StateWriter(state, self._keep, self._device).changes(own)]

    def _path(self, held: Any) -> list[Any] | None:
        while id(held) not in self._paths:  # mostly near, and the way is long
            try:
                path, found = next(self._walk)
            except StopIteration:
                return None
            self._paths[id(found)] = path
        return self._paths[id(held)]


def restored_state(
    built: State, changes: Mapping[str, Data], tensor_of: Callable[[int], torch.Tensor]
) -> State:
    """Return the state that a layer had when ``changes`` were read of it.

    Args:
        built: the state that it was built in.
        tensor_of: the memory of a number, uint8.
    Raises: ValueError: the changes are of another layer, or no such data.
    """
    reading = _Reading(built, tensor_of)
    try:
        read = {name: reading.value(data, (name,)) for name, data in changes.items()}
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {**built, **read}


class _Reading:
    def __init__(self, built: State, tensor_of: Callable[[int], torch.Tensor]) -> None:
        self._built = built
        self._tensor_of = tensor_of
        self._tensors: dict[str, torch.Tensor] = {}
        self._reachable: dict[str, Any] | None = None

    def value(self, data: Data, at: tuple[str, ...]) -> Any:
        kind, held = data
        match kind:
            case "plain":
                if held is not None and type(held) not in _PLAIN:
                    raise ValueError(f"{held!r:.80} is no plain value")
                return held
            case "tensor":
                return self._tensor(held)
            case "parameter":
                return self._parameter(held, at)
            case "dtype":
                return dtype_of(held)
            case "tuple":
                return tuple(self.value(part, at) for part in held)
            case "list":
                return [self.value(part, at) for part in held]
            case "dict":
                return {name: self.value(part, (*at, name)) for name, part in held.items()}
            case "built":
                return self._found(held)
            case "partial":
                function, args, keywords = (self.value(part, at) for part in held)
                return partial(function, *args, **keywords)
            case "product":
                name, members = held
                return _PRODUCTS[name](*(self.value(part, at) for part in members))
            case "method":
                owner, name = self.value(held[0], at), held[1]
                method = getattr(owner, name)
                if type(method) is not MethodType or method.__func__.__name__ != name:
                    raise ValueError(f"{name!r:.80} is no method of {type(owner).__name__}")
                return method
            case "copy":
                path, changes = held
                return self._copy(self._found(path), changes)
        raise ValueError(f"{kind!r:.80} is no kind of value")

    def _tensor(self, held: Any) -> torch.Tensor:
        key = repr(held)
        if key not in self._tensors:
            number, form = held
            memory = self._tensor_of(number)
            dtype, shape, strides, offset = form
            # The library checks neither sign nor end of what a storage that cannot grow is asked.
            check_view(form, memory.nbytes, "a tensor")
            empty = torch.empty(0, dtype=dtype_of(dtype), device=memory.device)
            first, rest = divmod(int(memory.storage_offset()), empty.itemsize)
            if rest:
                raise ValueError(f"a memory begins {rest} bytes behind where {dtype} may")
            self._tensors[key] = empty.set_(
                memory.untyped_storage(), first + offset, shape, strides
            )
        return self._tensors[key]

    def _parameter(self, held: Any, at: tuple[str, ...]) -> nn.Parameter:
        parameter = nn.Parameter(self._tensor(held), requires_grad=False)
        before: Any = self._built
        for name in at:
            before = before.get(name) if isinstance(before, dict) else None
        if isinstance(before, nn.Parameter):
            parameter.__dict__.update(before.__dict__)
        return parameter

    def _copy(self, pattern: Any, changes: Mapping[str, Data]) -> nn.Module:
        if not isinstance(pattern, nn.Module):
            raise ValueError(f"{type(pattern).__name__} is no layer")
        layer = copy(pattern)
        vars(layer).update(restored_state(state_of(pattern), changes, self._tensor_of))
        return layer

    def _found(self, path: list[Any]) -> Any:
        if self._reachable is None:
            self._reachable = {repr(path): found for path, found in _reachable(self._built)}
        return self._reachable[repr(path)]


def _same(held: Any, built: Any) -> bool:
    if held is built:
        return True
    if type(held) is not type(built):
        return False
    if isinstance(held, dict):
        return held.keys() == built.keys() and all(_same(held[key], built[key]) for key in held)
    if isinstance(held, tuple | list):  # named ones as well, which were made again
        return len(held) == len(built) and all(map(_same, held, built))
    return type(held) in _PLAIN and bool(held == built)


def _reachable(built: State) -> Iterator[tuple[list[Any], Any]]:
    """Yield what a layer was built with, and the path to it: names and numbers of members."""
    waiting = deque([([name], held) for name, held in built.items()])
    seen: set[int] = set()
    while waiting:
        path, held = waiting.popleft()
        if id(held) in seen or held is None or isinstance(held, (*_PLAIN, torch.Tensor, Site)):
            continue
        seen.add(id(held))
        yield path, held
        if len(path) < _MOST_STEPS:
            waiting += [([*path, name], part) for name, part in _members(held)]


def _members(held: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(held, dict):
        yield from ((key, part) for key, part in held.items() if type(key) is str)
    elif isinstance(held, tuple | list):
        yield from enumerate(held)
    elif isinstance(held, nn.Module | type):
        return
    elif is_dataclass(held):
        yield from ((field.name, getattr(held, field.name)) for field in fields(held))
    else:
        yield from getattr(held, "__dict__", {}).items()
