"""Communicators with a mistake in each collective, for tests of the kit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from interposer import Ranks
from interposer.errors import RankError
from interposer_ops.communicators import TorchCommunicator


class Wrong(TorchCommunicator):
    """Each collective has its own mistake."""

    in_place: ClassVar[bool] = False
    _kept: Tensor | None = None

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        path = Path(f"/dev/shm/interposer-wrong-{os.getpid()}")
        path.write_bytes(b"left")
        self._shared = torch.from_file(str(path), shared=True, size=4, dtype=torch.uint8)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Round sums of opposite signs in another way on rank 1, by less than is allowed.

        The result is in memory that the next call writes, and a lost rank is another error.
        """
        before = x.clone()
        try:
            result = super().all_reduce(x)
        except RankError as error:
            raise ValueError("something went wrong") from error
        if self.ranks.rank == 1 and result.is_floating_point():
            off = 1 + 2 * torch.finfo(result.dtype).eps
            fractions = (result != result.round()) & (result.abs() < before.abs() / 8)
            result[fractions] *= off
        if self._kept is None or self._kept.shape != result.shape:
            self._kept = result.clone()
        return self._kept.copy_(result)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Normalise what the stream was before the sum."""
        total = residual + super().all_reduce(x)
        return torch.nn.functional.rms_norm(residual, weight.shape, weight.float(), eps), total

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows in the opposite order of the ranks."""
        parts = super().all_gather(x, sizes).split(list(sizes))
        return parts[-1].new_tensor([]) if not parts else _joined(parts[::-1])

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Forget the elements after the last whole eight."""
        result = super().reduce_scatter(x, sizes)
        result.view(-1)[result.numel() // 8 * 8 :] = 0
        return result

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Write what it was given."""
        result = super().all_to_all(x, sent, received)
        x.zero_()
        return result

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return a copy, as if nobody looked at x."""
        return super().broadcast(x.clone(), source)

    def close(self) -> None:
        """Raise the second time."""
        if self._own.group is None:
            raise RuntimeError("closed before")
        super().close()


def _joined(parts: Sequence[Tensor]) -> Tensor:

    return torch.cat(list(parts))


class Dead(TorchCommunicator):
    """Ends the process, as native code may."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Leave at once."""
        os._exit(3)
