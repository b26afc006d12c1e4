"""Memory of one weight update, reused for the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from interposer_ops.devices import host_memory

_ALIGNED_BYTES = 64
_ALL_BYTES = 1 << 62


class SpareMemory:
    """Memory of replaced and received weights, free for other content.

    The system clears new memory, and a virtual machine may have to request memory from the host.
    Both take longer than receiving weights.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._maps: host_memory.Spare | None = None

    @contextmanager
    def used(self, *, keeps: bool) -> Iterator[None]:
        """Allocate from the spare memory first, within a ``with`` block.

        Args:
            keeps: whether memory that becomes free is kept for the next block.
        """
        if not keeps:
            self._clear()
        elif self._maps is None:
            self._maps = host_memory.Spare(_ALL_BYTES)
        with host_memory.reused(self._maps), host_memory.placed(self._take):
            yield

    def put(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Keep the memory of replaced weights for the next block."""
        self._free.clear()
        for storage in storages:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            # Kernels expect the alignment that the allocator guarantees.
            if memory.data_ptr() % _ALIGNED_BYTES == 0:
                self._free[memory.nbytes].append(memory)

    def _take(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        memories = self._free.get(num_bytes) if lasting else None
        return memories.pop() if memories else None

    def _clear(self) -> None:
        self._free.clear()
        if self._maps is not None:
            self._maps.close()
            self._maps = None
