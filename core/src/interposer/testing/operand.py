"""Arguments in memory of their own that is poisoned around them and watched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Operand", "poisoned_memory"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARGIN = 64


class Operand:
    """A copy of a tensor with its own strides, alone in a buffer.

    Every element of the buffer that the tensor does not cover, before, after and between, has all
    bits set, which is a NaN of any float dtype: reading it shows in the result, writing it shows
    in ``strays``.

    Attributes:
        tensor: the copy.
    """

    def __init__(self, value: torch.Tensor, device: str) -> None:
        places = _places(value) + _MARGIN
        extent = int(places.max()) + 1 if value.numel() else _MARGIN
        bits = torch.full((extent + _MARGIN,), -1, dtype=torch.int64)
        bits = bits.to(_BITS[value.dtype.itemsize])
        bits[places] = value.detach().cpu().view(bits.dtype)
        self._covered = torch.zeros(bits.shape, dtype=torch.bool)
        self._covered[places] = True
        self._before = bits
        self._buffer = bits.to(device, copy=True)
        start = value.storage_offset() + _MARGIN
        # No view of the buffer: what traces a call would see the buffer behind it.
        empty = torch.empty(0, dtype=value.dtype, device=device)
        storage = self._buffer.untyped_storage()
        self.tensor = empty.set_(storage, start, value.shape, value.stride())

    def is_changed(self) -> bool:
        """Return whether any bit of the buffer differs from what it was."""
        return not torch.equal(self._buffer.cpu(), self._before)

    def is_written(self) -> bool:
        """Return whether any bit of the tensor itself differs from what it was."""
        return bool((self._buffer.cpu() != self._before)[self._covered].any())

    def strays(self) -> int:
        """Return how many elements outside the tensor were written."""
        changed = self._buffer.cpu() != self._before
        return int((changed & ~self._covered).sum())


def _places(value: torch.Tensor) -> torch.Tensor:
    """Return the offset of every element in its storage."""
    places = torch.tensor(value.storage_offset())
    for size, stride in zip(value.shape, value.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory that torch hands out uninitialised with NaN, or the largest integer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic impl")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
