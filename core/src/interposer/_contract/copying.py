"""Copies in depth of facts that plugins receive, faster than ``copy.deepcopy``."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def copied(fact: Any) -> Any:
    """Copy dataclasses with slots, tuples and dicts in depth; leave the rest to ``copy.deepcopy``.

    Each observer receives a copy of each selection, and loading a model makes hundreds of them.
    An exception is not copied, since its copy would never be equal to it.
    """
    kind: Any = type(fact)
    if kind in _IMMUTABLE or isinstance(fact, BaseException):
        return fact
    if kind is tuple:
        return tuple([copied(item) for item in fact])
    if kind is dict:
        return {copied(key): copied(value) for key, value in fact.items()}
    if kind is frozenset and all(type(item) in _IMMUTABLE for item in fact):
        return fact
    names = _slots(kind)
    if not names:
        return copy.deepcopy(fact)
    duplicate = object.__new__(kind)
    for name in names:
        object.__setattr__(duplicate, name, copied(getattr(fact, name)))
    return duplicate


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass with slots; () for other types and own ways to copy."""
    if kind.__dictoffset__ or hasattr(kind, "__deepcopy__") or not is_dataclass(kind):
        return ()
    return tuple(field.name for field in fields(kind))
