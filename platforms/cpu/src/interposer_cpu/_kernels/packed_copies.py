"""One packed copy for several kernels, such as those of an embedding and a tied lm_head."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Packed = tuple[torch.Tensor, int]
"""Bytes that the library reads, uint8, and the number of rows that they hold."""

Parts = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A packed copy with the tensors that it was made of; it keeps none of them.

    Attributes:
        versions: of the tensors, which change when they are written; None for one that is none.
    """

    packed: weakref.ref[torch.Tensor]
    form: int
    parts: tuple[weakref.ref[torch.Tensor] | None, ...]
    versions: tuple[int | None, ...]


# By the weight. A copy goes when no kernel holds it any more.
_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def shared_copy(form: int, parts: Parts, pack: Callable[[], Packed]) -> Packed:
    """Return what ``pack`` returned for the same unchanged tensors, if it is held, or now returns.

    Args:
        form: what else ``pack`` depends on.
        parts: the weight and what belongs to it.
    """
    weight = parts[0]
    # Tensors of inference mode do not count how often they were written.
    if weight is None or any(part is not None and part.is_inference() for part in parts):
        return pack()
    versions = tuple(None if part is None else part._version for part in parts)
    found: _Copy | None = _COPIES.get(weight)
    if found is not None and (found.form, found.versions) == (form, versions):
        packed = found.packed()
        known = (None if ref is None else ref() for ref in found.parts)
        if packed is not None and all(map(operator.is_, known, parts)):
            return packed, len(weight)
    made = pack()
    refs = tuple(None if part is None else weakref.ref(part) for part in parts)
    _COPIES[weight] = _Copy(weakref.ref(made[0]), form, refs, versions)
    return made
