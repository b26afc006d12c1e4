"""Forwards that a library set on an instance around the one of its class.

Tensor parallelism of transformers and the hooks of accelerate do that: what they set sends tensors
to other processes or devices, and calls the forward of the class in between. A kernel takes the
place of that call alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from interposer_models._adapt.forwards import Forward

Around = Callable[[Forward], tuple[str, Any]]
"""Returns the attribute of the module, and what it has to be, for another forward within."""

# Objects in objects: what parts experts holds a strategy for each kind of call.
_DEPTH = 2


def is_wrapped(module: nn.Module) -> bool:
    """Say whether an instance has a forward that is not its class's."""
    found = vars(module).get("forward")
    return found is not None and not _is_own(found, module)


def around_forward(module: nn.Module) -> Around | None:
    """Return how to put another forward within the one that was set on an instance.

    That one is known to call the forward of the class if it holds it: in a variable of its closure,
    in an attribute of an object there, or in one attribute of the module. Nothing that is held is
    changed: the function is made anew around copies.

    Returns: None if it is not known to do so.
    """
    held = [name for name, value in vars(module).items() if _is_own(value, module)]
    if held:
        (name, *others) = held
        return None if others else lambda inner: (name, inner)
    outer = vars(module).get("forward")
    if not isinstance(outer, FunctionType):
        return None
    cells = outer.__closure__ or ()
    if not any(_exchanged(cell, module, _other)[1] for cell in cells):
        return None

    def around(inner: Forward) -> tuple[str, Any]:
        closure = tuple(_exchanged(cell, module, inner)[0] for cell in cells)
        again = FunctionType(
            outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure
        )
        again.__kwdefaults__ = outer.__kwdefaults__
        again.__dict__.update(vars(outer))
        return "forward", again

    return around


def _other(*_: Any) -> None:
    """Stand for any forward, where it only matters whether there is a place for one."""


def _exchanged(cell: CellType, module: nn.Module, inner: Forward) -> tuple[CellType, bool]:
    """Return a cell that holds ``inner`` where this one does the class's forward, if it does."""
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell, False
    found = _with(content, module, inner, _DEPTH)
    return (cell, False) if found is content else (CellType(found), True)


def _with(value: Any, module: nn.Module, inner: Forward, depth: int) -> Any:
    """Return ``value``, or a copy of it in which ``inner`` stands for the class's forward."""
    if _is_own(value, module):
        return inner
    if not depth or isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
        return value
    changed: dict[str, Any] = {}
    for name, each in vars(value).items():
        found = _with(each, module, inner, depth - 1)
        if found is not each:
            changed[name] = found
    if not changed:
        return value
    twin = copy.copy(value)
    vars(twin).update(changed)
    return twin


def _is_own(value: object, module: nn.Module) -> bool:
    """Say whether a value is the forward of the module's class, bound to the module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward
