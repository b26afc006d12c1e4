"""The mask function that transformers calls for interposer's attention.

The function returns the mask that sdpa would get, so that every call can be delegated to sdpa. If
kernels support the mask's pattern, the tensor carries ``MaskFacts`` as an attribute. A model that
changes the mask makes a new tensor without the attribute, so that calls are delegated.

Dimensions: B sequences, U key tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from interposer_models._adapt.attention_interceptor import INTERCEPTOR
from interposer_models._adapt.mask_pattern import Pattern, find_pattern

_FACTS = "_interposer_facts"

Run = tuple[int, int]
"""The first key of a sequence that is no padding, and the number of keys without a gap."""


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """The pattern of a mask and its size in queries and keys.

    Attributes:
        runs: the keys of each sequence that are no padding, None if there is no padding.
    """

    pattern: Pattern
    num_queries: int
    num_keys: int
    runs: tuple[Run, ...] | None


def mask_facts(mask: Tensor) -> MaskFacts | None:
    """Return the facts attached to a mask, None for an unknown or changed mask."""
    return getattr(mask, _FACTS, None)


def make_mask_function(sdpa_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap transformers' mask function for sdpa: attach ``MaskFacts`` to each mask."""

    def mask_function(*args: Any, **settings: Any) -> Tensor | None:
        # transformers passes keywords; positional arguments mean another caller.
        interceptor = None if args or is_compiling() else INTERCEPTOR.get()
        if interceptor is not None:
            return interceptor.mask(make_mask, settings)
        return make_mask(*args, **settings)

    def make_mask(*args: Any, **settings: Any) -> Tensor | None:
        mask = sdpa_mask(*args, **settings)
        if mask is not None and not args and not is_compiling():
            facts = _facts(**settings)
            if facts is not None:
                setattr(mask, _FACTS, facts)
        return mask

    return mask_function


def _facts(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskFacts | None:
    # A user's mask function may treat any position specially, so that probing a few proves nothing.
    if mask_function is None or use_vmap or not isinstance(q_offset, int):
        return None
    pattern = find_pattern(mask_function)
    if pattern is None:
        return None
    # Kernels align the last query with the last key.
    if (pattern.causal or pattern.window) and q_offset + q_length != kv_offset + kv_length:
        return None
    runs = None
    if attention_mask is not None:
        runs = _runs(attention_mask, kv_offset, kv_length)
        if runs is None:
            return None
        if all(run == (0, kv_length) for run in runs):
            runs = None
    return MaskFacts(pattern, q_length, kv_length, runs)


def _runs(padding: Tensor, first: int, length: int) -> tuple[Run, ...] | None:
    """Return the run of unpadded keys of each row; None if a row has several runs.

    The run of a row that is all padding is empty.
    """
    rows = padding[:, first : first + length].bool()
    if rows.shape[1] < length:
        rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
    counts = rows.sum(1)
    starts = rows.int().argmax(1)
    ends = length - rows.flip(1).int().argmax(1)
    if not bool(((counts == 0) | (ends - starts == counts)).all()):
        return None
    return tuple(zip(starts.tolist(), counts.tolist(), strict=True))
