"""Memory layouts of arguments: the strides that an op accepts, and tensors with such strides.

Arguments are dense unless the op declares more. Each kind of ``Strides`` also allows all earlier
ones:

- ``offset``: dense, starting at any element of a storage.
- ``outer``: the outermost dimension may have gaps, as slices of a fused projection have.
- ``rows``: every dimension except the last may have gaps.
- ``leading``: the number of dimensions before the last may vary.
- ``any``: every dimension may have gaps, and dimensions may be transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from interposer_testing.cases._axis import DENSE

Strides = Literal["offset", "outer", "rows", "leading", "any"]


def _offset(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor to memory that starts one element after an aligned address."""
    storage = tensor.new_empty(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)


def _sliced(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor with a gap after each index of the first dimension, for any SIMD width."""
    return _with_gaps(tensor, 0, 64)


def _skipped(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor to every second index of the first dimension of a larger tensor."""
    # ``new_empty`` leaves the gaps uninitialised; ``Operand`` fills them with NaN later.
    storage = tensor.new_empty((2 * tensor.shape[0], *tensor.shape[1:]))
    return storage[::2].copy_(tensor)


def _padded(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor with a gap of three elements after each row, so that rows are not aligned."""
    return _with_gaps(tensor, max(tensor.ndim - 2, 0), 3)


def _uneven(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Copy a tensor with a gap after each row, of another size for every argument."""
    # A kernel that uses the row stride of one argument for another one then fails.
    return _with_gaps(tensor, max(tensor.ndim - 2, 0), 5 + 2 * number)


def _transposed(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor to memory in which the last two dimensions are exchanged."""
    if tensor.ndim < 2:
        return tensor
    return tensor.mT.contiguous().mT


def _spread(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Copy a tensor to every second element of the last dimension of a larger tensor."""
    if not tensor.ndim:
        return tensor
    storage = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    return storage[..., ::2].copy_(tensor)


def _with_gaps(tensor: torch.Tensor, dim: int, gap: int) -> torch.Tensor:
    """Copy a tensor with gaps of ``gap`` elements between the dense blocks of dimension ``dim``."""
    if tensor.ndim < 2:
        return tensor
    outer, inner = tensor.shape[: dim + 1], math.prod(tensor.shape[dim + 1 :])
    storage = tensor.new_empty((*outer, inner + gap))
    view = storage[..., :inner].view((*outer, *tensor.shape[dim + 1 :]))
    return view.copy_(tensor)


LAYOUTS: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "offset by one": _offset,
    "sliced": _sliced,
    "every second": _skipped,
    "padded rows": _padded,
    "uneven rows": _uneven,
    "transposed": _transposed,
    "spread": _spread,
}
"""Functions that copy a tensor to memory with a layout; they take the tensor and the index of its
argument."""

_OUTER = ("offset by one", "sliced", "every second")
_ROWS = (*_OUTER, "padded rows", "uneven rows")
_PERMITTED: Mapping[Strides, tuple[str, ...]] = {
    "offset": ("offset by one",),
    "outer": _OUTER,
    "rows": _ROWS,
    "leading": _ROWS,
    "any": tuple(LAYOUTS),
}

MEANINGS: Mapping[Strides, str] = {
    "offset": "dense",
    "outer": "its first dimension may skip memory",
    "rows": "every dimension but the last may skip memory",
    "leading": "every dimension but the last may skip memory, and there may be any number of them",
    "any": "every dimension may skip memory, in any order",
}
"""Descriptions of the accepted strides. Every tensor may start at any element of a storage."""


def layouts_of(strided: Mapping[str, Strides]) -> list[str]:
    """Return the layouts that at least one argument may have, dense first."""
    permitted = {layout for kind in strided.values() for layout in _PERMITTED[kind]}
    return [DENSE, *(layout for layout in LAYOUTS if layout in permitted)]


def laid_out(
    tensors: Mapping[str, torch.Tensor], layout: str, strided: Mapping[str, Strides]
) -> dict[str, torch.Tensor]:
    """Copy the tensors that may have ``layout`` to memory with that layout."""
    return {
        name: LAYOUTS[layout](tensor, number)
        if name in strided and layout in _PERMITTED[strided[name]] and tensor.numel()
        else tensor
        for number, (name, tensor) in enumerate(tensors.items())
    }
