"""Detection of a mask's pattern by evaluating the mask function at a few pairs of positions.

Kernels support four patterns: all keys, keys up to the query, and either within a window. Other
masks, such as image blocks, packed sequences and chunks, have no pattern here.
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
    """The keys that a query attends to.

    Attributes:
        causal: no keys after the query's position.
        window: only keys less than this many positions away, None for no limit.
    """

    causal: bool
    window: int | None = None


# By code and constants of the function: one entry for each kind of layer and window size.
_PATTERNS: dict[Hashable, Pattern | None] = {}


def find_pattern(function: MaskFunction) -> Pattern | None:
    """Return the pattern of a transformers mask function, None for an unsupported pattern.

    A function that holds tensors depends on more than positions, and has no pattern.
    """
    constants: set[int] = set()
    key = _function_key(function, constants)
    if key is None:
        return None
    if key not in _PATTERNS:
        _PATTERNS[key] = _probe(function, sorted(constants))
    return _PATTERNS[key]


def _function_key(value: object, numbers: set[int]) -> Hashable | None:
    """Return a hashable key of a function's code and closure; None if the closure is not constant.

    Args:
        numbers: receives the integers in the closure, such as window sizes.
    """
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [_function_key(cell, numbers) for cell in (*cells, *(value.__defaults__ or ()))]
        return None if None in parts else (value.__code__, *parts)
    if isinstance(value, tuple | list):
        parts = [_function_key(element, numbers) for element in value]
        return None if None in parts else ("tuple", *parts)
    if isinstance(value, bool | str):
        return ("constant", value)
    if isinstance(value, int):
        numbers.add(value)
        return ("constant", value)
    return None


def _probe(function: MaskFunction, numbers: list[int]) -> Pattern | None:
    """Return the pattern that agrees with ``function`` at all distances that matter, if any."""
    # A pattern can change only near 0 and near multiples of the function's constants.
    probed = {*range(9)}
    for number in numbers:
        if number > 0:
            for multiple in (number, 2 * number, 3 * number):
                probed |= {multiple + step for step in range(-2, 3) if multiple + step >= 0}
    positions = torch.tensor(sorted(probed))
    queries, keys = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    actual = torch.as_tensor(function(zero, zero, queries, keys)).expand(len(probed), len(probed))
    patterns = [Pattern(True), Pattern(False)]
    for number in numbers:
        # transformers' bidirectional windows include the distance number itself.
        patterns += [Pattern(True, number), Pattern(False, number + 1)]
    matching = [p for p in patterns if torch.equal(_visible(p, queries, keys), actual)]
    return matching[0] if matching else None


def _visible(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    distance = queries - keys
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if pattern.window is None else visible & (distance.abs() < pattern.window)
