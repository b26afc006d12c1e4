"""Pages and state rows as tensors, for copies within the device or to other memory.

Dimensions: N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from interposer_models._engine.state_rows import States

_ALIGNED_BYTES = 64


class CacheContents:
    """Tensors of cache pages and state rows, addressed by number.

    Attributes:
        states: State tensors of each layer that keeps a recurrent state.
    """

    def __init__(self, pools: Sequence[Sequence[tuple[Tensor, int]]], states: States = ()) -> None:
        """Refer to existing caches.

        Args:
            pools: For each page pool, the cache tensors of the layers, each with the page axis.
            states: State tensors of each recurrent layer.
        """
        self._pools = pools
        self.states = states

    def page(self, pool_index: int, page: int) -> list[Tensor]:
        """Return one page of a pool, as one tensor per layer."""
        return [cache.select(axis, page) for cache, axis in self._pools[pool_index]]

    def copy_page(self, pool_index: int, source: int, target: int) -> None:
        """Copy the page ``source`` of a pool to the page ``target``, in all layers."""
        for cache, axis in self._pools[pool_index]:
            cache.select(axis, target).copy_(cache.select(axis, source))

    def page_bytes(self, pool_index: int) -> int:
        """Return the packed size of one page of a pool over all layers, in bytes; see ``pack``."""
        return _packed_bytes([cache.select(axis, 0) for cache, axis in self._pools[pool_index]])


def state_row(states: States, row: int) -> list[Tensor]:
    """Return one row of every state tensor."""
    return [part[row] for layer in states for part in layer]


def row_bytes(states: States) -> int:
    """Return the packed size of one state row over all layers, in bytes; see ``pack``."""
    return _packed_bytes([part[0] for layer in states for part in layer])


def pack(parts: Sequence[Tensor], memory: Tensor, queued: bool = False) -> None:
    """Copy tensors into the byte buffer ``memory``, each one aligned to 64 bytes.

    Args:
        memory: One-dimensional uint8 tensor on any device.
        queued: Do not wait for the copy. Safe only if the device itself orders later reads after
            it.
    """
    for part, target in zip(parts, _aligned_views(parts, memory), strict=True):
        target.copy_(part, non_blocking=queued)


def unpack(memory: Tensor, parts: Sequence[Tensor], queued: bool = False) -> None:
    """Copy tensors of the same shapes and dtypes back from the buffer that ``pack`` filled."""
    for part, stored in zip(parts, _aligned_views(parts, memory), strict=True):
        part.copy_(stored, non_blocking=queued)


def _packed_bytes(parts: Sequence[Tensor]) -> int:
    return sum(-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts)


def _aligned_views(parts: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Return views of ``memory`` with the dtypes and shapes of ``parts``."""
    views, start = [], 0
    for part in parts:
        view = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
        views.append(view)
        # A view with another dtype needs an aligned start.
        start += -(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return views
