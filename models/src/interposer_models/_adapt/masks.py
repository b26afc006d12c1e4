"""The mask function by which transformers tells the attention what may be seen.

It returns the mask that sdpa would get, so that any call can be delegated. Where the mask is one of
the patterns that kernels know, the tensor carries that fact. If a model changes the mask, the fact
is lost with the tensor, and the call is delegated.

Dimensions: B sequences, U key tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from interposer_models._adapt.mask_pattern import Pattern, pattern_of
from interposer_models._adapt.visit import VISITOR

_FACTS = "_interposer_facts"

Run = tuple[int, int]
"""The first key of a sequence that is no padding, and how many follow without a gap."""


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """The meaning of a mask, for as many queries and keys as it is made for.

    Attributes:
        runs: the keys of each sequence that are no padding, None where all are.
    """

    pattern: Pattern
    num_queries: int
    num_keys: int
    runs: tuple[Run, ...] | None


def facts_of(mask: Tensor) -> MaskFacts | None:
    """Return what the mask function knew about a mask, None if it is another's or was changed."""
    return getattr(mask, _FACTS, None)


def mask_by(sdpa_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return the mask function over the one that makes masks for sdpa."""

    def mask_of(*args: Any, **settings: Any) -> Tensor | None:
        visitor = None if args or is_compiling() else VISITOR.get()
        if visitor is not None:
            return visitor.mask(made, settings)
        return made(*args, **settings)

    def made(*args: Any, **settings: Any) -> Tensor | None:
        mask = sdpa_mask(*args, **settings)
        if mask is not None and not args and not is_compiling():
            facts = _facts(**settings)
            if facts is not None:
                setattr(mask, _FACTS, facts)
        return mask

    return mask_of


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
    # Functions of users may look at any position, so that asking about a few proves nothing.
    if mask_function is None or use_vmap or not isinstance(q_offset, int):
        return None
    pattern = pattern_of(mask_function)
    if pattern is None:
        return None
    # Kernels let the last query stand where the last key does.
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
    """Return the run of each row, of no key where all is padding; None if a row has several."""
    rows = padding[:, first : first + length].bool()
    if rows.shape[1] < length:
        rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
    counts = rows.sum(1)
    starts = rows.int().argmax(1)
    ends = length - rows.flip(1).int().argmax(1)
    if not bool(((counts == 0) | (ends - starts == counts)).all()):
        return None
    return tuple(zip(starts.tolist(), counts.tolist(), strict=True))
