"""Memory of one exchange of weights, kept for the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from interposer_ops.devices import host_memory

_ALIGNED_BYTES = 64
_ALL_BYTES = 1 << 62


class SpareMemory:
    """Memory of weights that were replaced, and of those that were received, without content.

    The system clears new memory, and a virtual machine may have to ask its host for it first. That
    takes longer than receiving weights does.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._maps: host_memory.Spare | None = None

    @contextmanager
    def used(self, *, keeps: bool) -> Iterator[None]:
        """Return a block in which new memory is what was kept, as far as that fits.

        Args:
            keeps: what is not used any more is kept for the next block.
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
            if memory.data_ptr() % _ALIGNED_BYTES == 0:
                self._free[memory.nbytes].append(memory)

    def _take(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        found = self._free.get(num_bytes) if lasting else None
        return found.pop() if found else None

    def _clear(self) -> None:
        self._free.clear()
        if self._maps is not None:
            self._maps.close()
            self._maps = None
