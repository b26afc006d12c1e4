"""Packed weights shared by several kernels, such as an embedding and a tied lm_head."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Packed = tuple[torch.Tensor, int]
"""Packed weight, uint8, and its number of rows (output features)."""

Parts = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A packed copy, and weak references to the tensors from which the copy was packed.

    Attributes:
        versions: version counters of the tensors, which change with every write; None for an absent
            tensor.
    """

    packed: weakref.ref[torch.Tensor]
    form: int
    parts: tuple[weakref.ref[torch.Tensor] | None, ...]
    versions: tuple[int | None, ...]


# Copies by weight. The copy itself is referenced weakly and so freed together with the last kernel
# that uses the copy.
_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def shared_copy(form: int, parts: Parts, pack: Callable[[], Packed]) -> Packed:
    """Return the cached packed copy of unchanged tensors, or pack and cache one.

    Args:
        form: the packed format.
        parts: the weight, then its scales, zero points and bias.
    """
    weight = parts[0]
    # Inference tensors have no version counter, so that a write would go unnoticed.
    if weight is None or any(part is not None and part.is_inference() for part in parts):
        return pack()
    versions = tuple(None if part is None else part._version for part in parts)
    copy: _Copy | None = _COPIES.get(weight)
    if copy is not None and (copy.form, copy.versions) == (form, versions):
        packed = copy.packed()
        copy_parts = (None if ref is None else ref() for ref in copy.parts)
        if packed is not None and all(map(operator.is_, copy_parts, parts)):
            return packed, len(weight)
    new_packed = pack()
    refs = tuple(None if part is None else weakref.ref(part) for part in parts)
    _COPIES[weight] = _Copy(weakref.ref(new_packed[0]), form, refs, versions)
    return new_packed
