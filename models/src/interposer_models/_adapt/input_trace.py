"""The trace that finds projections of one input: what a class does with its children, as leaves.

Children give tensors without memory, so that a trace computes nothing. It ends where the class
needs what nobody can make up; what it did until then is known.
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
_FEWEST = 2


class _Call(NamedTuple):
    """One call of a child with a tensor, which is held so that no other takes its place."""

    child: str
    x: Tensor
    version: int


class _Noted(nn.Module):
    """A child that notes what it is called with."""

    def __init__(self, child: nn.Module, name: str, calls: list[_Call]) -> None:
        super().__init__()
        vars(self).update(noted=child, name=name, calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["noted"], name)

    def forward(self, x: Any, *args: Any, **named: Any) -> Tensor:
        """Return a tensor of the size that the child would give."""
        child = vars(self)["noted"]
        if not isinstance(x, Tensor) or args or named or child._modules:
            raise TypeError("a trace follows children that take one tensor")
        self.calls.append(_Call(self.name, x, x._version))
        size = child.out_features if type(child) is nn.Linear else x.shape[-1]
        return x.new_empty(*x.shape[:-1], size)


class _Unknown:
    """An argument of which a trace knows nothing."""

    def __iter__(self) -> Iterator[_Unknown]:
        # The only thing that classes unpack before they project are cosines and sines.
        return iter((_Unknown(), _Unknown()))


def find_sharing(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the projections that read one tensor whatever the module is called with, by groups.

    An argument that only some of them read, such as the states of an encoder, keeps these apart
    from the others.
    """
    linears = {n: c for n, c in module._modules.items() if type(c) is nn.Linear}
    if len(linears) < _FEWEST:
        return []
    groups = []
    for size in dict.fromkeys(linear.in_features for linear in linears.values()):
        alike = {name for name, linear in linears.items() if linear.in_features == size}
        if len(alike) >= _FEWEST:
            groups += _groups(module, alike, size)
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

    def traced(given: str = "") -> tuple[list[_Call], bool]:
        """Trace with the defaults, but a tensor for the argument ``given``."""
        arguments: dict[str, Any] = {
            parameter.name: _Unknown()
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in _MANY
        }
        for name in filter(None, (parameters[0].name, given)):
            arguments[name] = torch.empty(*_SHAPE, size, dtype=dtype, device="meta")
        return _trace(module, arguments)

    calls, _ = traced()
    called = [call.child for call in calls]
    once = {name for name in names if called.count(name) == 1}
    groups = _parts(once, calls, finished=True)
    for parameter in parameters[1:] if groups else []:
        if parameter.kind not in _MANY:
            others = traced(parameter.name)
            groups = [part for group in groups for part in _parts(set(group), *others)]
    return groups


_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parts(names: set[str], calls: list[_Call], finished: bool) -> list[tuple[str, ...]]:
    """Return the groups of ``names`` that read one tensor in a trace, as far as it got."""
    read: dict[tuple[int, int], list[str]] = {}
    for call in calls:
        if call.child in names:
            read.setdefault((id(call.x), call.version), []).append(call.child)
    uncalled = sorted(names.difference(*read.values()))
    if uncalled and not finished and len(read) <= 1:
        # The trace ended before them, so that it says nothing against what others said.
        return [(*next(iter(read.values()), ()), *uncalled)]
    return [tuple(group) for group in (*read.values(), uncalled) if len(group) >= _FEWEST]


def _trace(module: nn.Module, arguments: dict[str, Any]) -> tuple[list[_Call], bool]:
    """Return the calls of children, and whether the forward came to its end."""
    calls: list[_Call] = []
    stand_in: Any = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    # What the class assigns or writes to stays with the stand-in.
    for held in ("_parameters", "_buffers"):
        tensors = vars(module)[held].items()
        vars(stand_in)[held] = {n: t if t is None else t.detach().to("meta") for n, t in tensors}
    children = {
        name: None if child is None else _Noted(child, name, calls)
        for name, child in module._modules.items()
    }
    vars(stand_in)["_modules"] = children
    try:
        with torch.no_grad():
            type(module).forward(stand_in, **arguments)
    except Exception as error:  # noqa: BLE001 - where a trace ends is no fault of the class
        _log.debug("the trace of %s ended with %r", type(module).__name__, error)
        return calls, False
    return calls, True
