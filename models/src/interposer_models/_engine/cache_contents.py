"""Pages and rows of states as tensors, to be copied within the device or to other memory.

Dimensions: N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from interposer_models._engine.state_rows import States

_ALIGNED_BYTES = 64


class CacheContents:
    """The memory behind the numbers of pages and rows.

    Attributes:
        states: of each layer that keeps one.
    """

    def __init__(self, pools: Sequence[Sequence[tuple[Tensor, int]]], states: States = ()) -> None:
        """Hold the caches.

        Args:
            pools: for each pool the caches of its layers, with the axis of their pages.
        """
        self._pools = pools
        self.states = states

    def page(self, place: int, page: int) -> list[Tensor]:
        """Return a page of the pool ``place`` in each layer."""
        return [cache.select(axis, page) for cache, axis in self._pools[place]]

    def copy_page(self, place: int, source: int, target: int) -> None:
        """Write to a page what another one of the pool ``place`` holds."""
        for cache, axis in self._pools[place]:
            cache.select(axis, target).copy_(cache.select(axis, source))

    def page_bytes(self, place: int) -> int:
        """Return the bytes that ``pack`` needs for a page of the pool ``place``."""
        return _packed_bytes([cache.select(axis, 0) for cache, axis in self._pools[place]])


def state_row(states: States, row: int) -> list[Tensor]:
    """Return a row of all states."""
    return [part[row] for layer in states for part in layer]


def row_bytes(states: States) -> int:
    """Return the bytes that ``pack`` needs for a row of all states."""
    return _packed_bytes([part[0] for layer in states for part in layer])


def pack(parts: Sequence[Tensor], memory: Tensor, queued: bool = False) -> None:
    """Write tensors one behind the other to ``memory``, bytes of any device.

    Args:
        queued: do not wait for the device, which reads the memory itself before others do.
    """
    for part, held in zip(parts, _placed(parts, memory), strict=True):
        held.copy_(part, non_blocking=queued)


def unpack(memory: Tensor, parts: Sequence[Tensor], queued: bool = False) -> None:
    """Read tensors from ``memory``, to which ``pack`` wrote those of the same shapes."""
    for part, held in zip(parts, _placed(parts, memory), strict=True):
        part.copy_(held, non_blocking=queued)


def _packed_bytes(parts: Sequence[Tensor]) -> int:
    return sum(-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts)


def _placed(parts: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    found, start = [], 0
    for part in parts:
        held = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
        found.append(held)
        start += -(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return found
