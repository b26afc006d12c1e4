"""The pattern of a mask, found by asking its function about a few pairs of positions.

A pattern is one of four that kernels know: every key, keys up to the query, and either within a
window. Everything else, such as image blocks, packed sequences and chunks, is none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The keys that a query sees.

    Attributes:
        causal: no key behind its own position.
        window: keys less than so many positions away, None for all.
    """

    causal: bool
    window: int | None = None


# By what the function is made of. There are as many as kinds of layers and windows.
_KNOWN: dict[Hashable, Pattern | None] = {}


def pattern_of(function: MaskFunction) -> Pattern | None:
    """Return the pattern of a mask function of transformers, None if it has another one.

    A function that holds tensors depends on more than positions, so that it has none.
    """
    parts: set[int] = set()
    key = _made_of(function, parts)
    if key is None:
        return None
    if key not in _KNOWN:
        _KNOWN[key] = _asked(function, sorted(parts))
    return _KNOWN[key]


def _made_of(held: object, numbers: set[int]) -> Hashable | None:
    """Return the code of a function with what it closes over; None if that is no constant.

    Args:
        numbers: gets the integers that are found.
    """
    if isinstance(held, FunctionType):
        cells = [cell.cell_contents for cell in held.__closure__ or ()]
        parts = [_made_of(cell, numbers) for cell in (*cells, *(held.__defaults__ or ()))]
        return None if None in parts else (held.__code__, *parts)
    if isinstance(held, tuple | list):
        parts = [_made_of(each, numbers) for each in held]
        return None if None in parts else ("tuple", *parts)
    if isinstance(held, bool | str):
        return ("constant", held)
    if isinstance(held, int):
        numbers.add(held)
        return ("constant", held)
    return None


def _asked(function: MaskFunction, numbers: list[int]) -> Pattern | None:
    """Return the one pattern that agrees with ``function`` around all distances that matter."""
    near = {*range(9)}
    for number in numbers:
        if number > 0:
            for multiple in (number, 2 * number, 3 * number):
                near |= {multiple + step for step in range(-2, 3) if multiple + step >= 0}
    positions = torch.tensor(sorted(near))
    queries, keys = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    found = torch.as_tensor(function(zero, zero, queries, keys)).expand(len(near), len(near))
    patterns = [Pattern(True), Pattern(False)]
    for number in numbers:
        patterns += [Pattern(True, number), Pattern(False, number + 1)]
    agreeing = [p for p in patterns if torch.equal(_seen(p, queries, keys), found)]
    return agreeing[0] if agreeing else None


def _seen(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    distance = queries - keys
    seen = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if pattern.window is None else seen & (distance.abs() < pattern.window)
