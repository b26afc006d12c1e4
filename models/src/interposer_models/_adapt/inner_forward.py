"""Forwards that another library wrapped around the class's forward on an instance.

Tensor parallelism of transformers and the hooks of accelerate do so: the wrapper moves tensors
between processes or devices, and calls the class's forward in between. A kernel replaces only that
inner call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from interposer_models._adapt.forwards import Forward

Rewrap = Callable[[Forward], tuple[str, Any]]
"""Returns the attribute to set on the module, and its value, for another inner forward."""

# Depth of the search in nested objects: an expert-parallel wrapper holds strategy objects.
_DEPTH = 2


def is_wrapped(module: nn.Module) -> bool:
    """Return True if an instance has another forward than the class's."""
    forward = vars(module).get("forward")
    return forward is not None and not _is_class_forward(forward, module)


def find_rewrap(module: nn.Module) -> Rewrap | None:
    """Return a function that rebuilds the instance's wrapper around another inner forward.

    The wrapper must hold the class's forward in a variable of its closure, in an attribute of an
    object there, or in one attribute of the module. The wrapper itself is not changed, but
    rebuilt around copies.

    Returns: None if the wrapper does not hold the class's forward.
    """
    attributes = [name for name, value in vars(module).items() if _is_class_forward(value, module)]
    if attributes:
        (name, *more_attributes) = attributes
        return None if more_attributes else lambda inner: (name, inner)
    outer = vars(module).get("forward")
    if not isinstance(outer, FunctionType):
        return None
    cells = outer.__closure__ or ()
    if not any(_replace_in_cell(cell, module, _placeholder)[1] for cell in cells):
        return None

    def rewrap(inner: Forward) -> tuple[str, Any]:
        closure = tuple(_replace_in_cell(cell, module, inner)[0] for cell in cells)
        rebuilt = FunctionType(
            outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure
        )
        rebuilt.__kwdefaults__ = outer.__kwdefaults__
        rebuilt.__dict__.update(vars(outer))
        return "forward", rebuilt

    return rewrap


def _placeholder(*_: Any) -> None:
    """Stand for any forward while the closure is only searched."""


def _replace_in_cell(cell: CellType, module: nn.Module, inner: Forward) -> tuple[CellType, bool]:
    """Return a cell with ``inner`` in place of the class's forward, and True if replaced."""
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell, False
    replaced = _replace_in(content, module, inner, _DEPTH)
    return (cell, False) if replaced is content else (CellType(replaced), True)


def _replace_in(value: Any, module: nn.Module, inner: Forward, depth: int) -> Any:
    """Return ``value``, or a copy of it with ``inner`` in place of the class's forward."""
    if _is_class_forward(value, module):
        return inner
    if not depth or isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
        return value
    changed: dict[str, Any] = {}
    for name, attribute in vars(value).items():
        replaced = _replace_in(attribute, module, inner, depth - 1)
        if replaced is not attribute:
            changed[name] = replaced
    if not changed:
        return value
    twin = copy.copy(value)
    vars(twin).update(changed)
    return twin


def _is_class_forward(value: object, module: nn.Module) -> bool:
    """Return True if a value is the class's forward bound to the module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward
