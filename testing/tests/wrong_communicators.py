"""Communicators with a mistake in each collective, for tests of the kit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from interposer import Ranks
from interposer.errors import RankError
from interposer_ops.communicators import TorchCommunicator


class Wrong(TorchCommunicator):
    """Each collective has its own mistake."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        self._file = Path(f"/dev/shm/interposer-wrong-{os.getpid()}")
        self._file.write_bytes(b"left")
        self._kept = Tensor()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Round in another way on rank 1."""
        found = super().all_reduce(x)
        if self.ranks.rank == 1 and found.is_floating_point():
            found *= 1 + 2**-8 if found.itemsize == 2 else 1 + 2**-24 * 1.5
        return found

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows in the opposite order of the ranks."""
        parts = super().all_gather(x, sizes).split(list(sizes))
        return parts[-1].new_tensor([]) if not parts else _joined(parts[::-1])

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Forget the elements after the last whole eight."""
        found = super().reduce_scatter(x, sizes)
        found.view(-1)[found.numel() // 8 * 8 :] = 0
        return found

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Write what it was given."""
        found = super().all_to_all(x, sent, received)
        x.zero_()
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return a copy, as if nobody looked at x."""
        return super().broadcast(x.clone(), source)

    def close(self) -> None:
        """Raise the second time."""
        if self._own.group is None:
            raise RuntimeError("closed before")
        super().close()


class Careless(TorchCommunicator):
    """Another error for a lost rank, and results in memory of its own that it uses again."""

    _memory: Tensor | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Tell of a lost rank late and by the wrong error."""
        try:
            return super().all_reduce(x)
        except RankError as error:
            time.sleep(0.1)
            raise ValueError("something went wrong") from error

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return rows in memory that the next call writes."""
        found = super().all_gather(x, sizes)
        if self._memory is None or self._memory.shape != found.shape:
            self._memory = found
            return found
        return self._memory.copy_(found)


def _joined(parts: Sequence[Tensor]) -> Tensor:

    return torch.cat(list(parts))


class Dead(TorchCommunicator):
    """Ends the process, as native code may."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Leave at once."""
        os._exit(3)
