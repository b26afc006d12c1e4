"""A trace that finds projections of the same input; children are leaves.

Children return meta tensors, so that a trace computes nothing. The trace ends where the class needs
real values; the calls until then are used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_log = logging.getLogger("interposer")
_SHAPE = (1, 3)
_MIN_GROUP_SIZE = 2


class _Call(NamedTuple):
    """One call of a child; the reference to the tensor keeps the tensor's id unique."""

    child: str
    x: Tensor
    version: int


class _RecordingChild(nn.Module):
    """A child that records calls."""

    def __init__(self, child: nn.Module, name: str, calls: list[_Call]) -> None:
        super().__init__()
        vars(self).update(child=child, name=name, calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["child"], name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Record the call and return a meta tensor in the shape of the child's result."""
        child = vars(self)["child"]
        if not isinstance(x, Tensor) or args or kwargs or child._modules:
            raise TypeError("a trace follows children that take one tensor")
        self.calls.append(_Call(self.name, x, x._version))
        size = child.out_features if type(child) is nn.Linear else x.shape[-1]
        return x.new_empty(*x.shape[:-1], size)


class _UnknownArgument:
    """An argument of unknown value."""

    def __iter__(self) -> Iterator[_UnknownArgument]:
        # Classes unpack only the pair of cosines and sines before they project.
        return iter((_UnknownArgument(), _UnknownArgument()))


def find_sharing(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of projections that read the same tensor for any arguments of the module.

    Projections of an optional argument, such as encoder states, form a separate group.
    """
    linears = {n: c for n, c in module._modules.items() if type(c) is nn.Linear}
    if len(linears) < _MIN_GROUP_SIZE:
        return []
    groups = []
    # Projections of different input sizes cannot read the same tensor.
    for size in dict.fromkeys(linear.in_features for linear in linears.values()):
        same_size_names = {name for name, linear in linears.items() if linear.in_features == size}
        if len(same_size_names) >= _MIN_GROUP_SIZE:
            groups += _groups(module, same_size_names, size)
    return groups


def _groups(module: nn.Module, names: set[str], size: int) -> list[tuple[str, ...]]:
    first: Any = module._modules[min(names)]
    dtype: torch.dtype = first.weight.dtype
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return []

    def trace_with(argument: str = "") -> tuple[list[_Call], bool]:
        """Trace with default arguments, and a tensor for ``argument``."""
        arguments: dict[str, Any] = {
            parameter.name: _UnknownArgument()
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        }
        for name in filter(None, (parameters[0].name, argument)):
            arguments[name] = torch.empty(*_SHAPE, size, dtype=dtype, device="meta")
        return _trace(module, arguments)

    calls, _ = trace_with()
    called_children = [call.child for call in calls]
    called_once = {name for name in names if called_children.count(name) == 1}
    groups = _parts(called_once, calls, is_complete=True)
    # An optional argument, such as encoder states, may replace the input of some projections.
    for parameter in parameters[1:] if groups else []:
        if parameter.kind not in _VARIADIC:
            trace = trace_with(parameter.name)
            groups = [part for group in groups for part in _parts(set(group), *trace)]
    return groups


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parts(names: set[str], calls: list[_Call], is_complete: bool) -> list[tuple[str, ...]]:
    """Return the groups of ``names`` that read the same tensor in a trace."""
    readers: dict[tuple[int, int], list[str]] = {}
    for call in calls:
        if call.child in names:
            readers.setdefault((id(call.x), call.version), []).append(call.child)
    uncalled = sorted(names.difference(*readers.values()))
    if uncalled and not is_complete and len(readers) <= 1:
        # The trace ended before these calls, so that it does not contradict earlier traces.
        return [(*next(iter(readers.values()), ()), *uncalled)]
    return [
        tuple(group) for group in (*readers.values(), uncalled) if len(group) >= _MIN_GROUP_SIZE
    ]


def _trace(module: nn.Module, arguments: dict[str, Any]) -> tuple[list[_Call], bool]:
    """Return the calls of children, and True if the forward completed."""
    calls: list[_Call] = []
    stand_in: Any = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    # Copies on the meta device: assignments and writes of the class must not reach the model.
    for attribute in ("_parameters", "_buffers"):
        tensors = vars(module)[attribute].items()
        vars(stand_in)[attribute] = {
            n: t if t is None else t.detach().to("meta") for n, t in tensors
        }
    children = {
        name: None if child is None else _RecordingChild(child, name, calls)
        for name, child in module._modules.items()
    }
    vars(stand_in)["_modules"] = children
    try:
        with torch.no_grad():
            type(module).forward(stand_in, **arguments)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        _log.debug("the trace of %s ended with %r", type(module).__name__, error)
        return calls, False
    return calls, True
