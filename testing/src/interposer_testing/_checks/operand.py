"""Arguments in memory of their own that is poisoned around them and watched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
        start = value.storage_offset() + _MARGIN
        steps = zip(value.shape, value.stride(), strict=True)
        extent = start + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
        bits = torch.full((extent + 1 + _MARGIN,), -1, dtype=_BITS[value.dtype.itemsize])
        # Elements that share one place are written once.
        once = value.detach().cpu()[tuple(slice(0, 1 if s == 0 else None) for s in value.stride())]
        bits.as_strided(once.shape, value.stride(), start).copy_(once.view(bits.dtype))
        self._covered = torch.zeros(bits.shape, dtype=torch.bool)
        self._covered.as_strided(once.shape, value.stride(), start).fill_(True)
        self._before = bits
        self._buffer = bits.to(device, copy=True)
        # No view of the buffer: what traces a call would see the buffer behind it.
        empty = torch.empty(0, dtype=value.dtype, device=device)
        storage = self._buffer.untyped_storage()
        self.tensor = empty.set_(storage, start, value.shape, value.stride())

    def is_changed(self) -> bool:
        """Return True if any bit of the buffer has changed."""
        return not torch.equal(self._buffer.cpu(), self._before)

    def is_written(self) -> bool:
        """Return True if any bit of the tensor itself has changed."""
        return bool((self._buffer.cpu() != self._before)[self._covered].any())

    def strays(self) -> int:
        """Return how many elements outside the tensor were written."""
        changed = self._buffer.cpu() != self._before
        return int((changed & ~self._covered).sum())


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
