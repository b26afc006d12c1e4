"""Deterministic sums: the bits depend neither on the backend nor on the rest of the tensor.

Dimensions: N ranks.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from interposer_ops.communicators._portable import TorchCommunicator, sum_of_parts

# Up to this size one all-gather is faster than a reduce-scatter and an all-gather.
_MAX_GATHERED_BYTES = 64 << 10


class OrderedCommunicator(TorchCommunicator):
    """The collectives of ``TorchCommunicator``, with float32 sums in the order of the ranks.

    Backends split a tensor into chunks and start each chunk's sum at another rank, so the rounding
    of an element depends on the size of the batch. Here it does not.
    """

    in_place: ClassVar[bool] = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks in place, rounded once, and return ``x``."""
        if x.nbytes > _MAX_GATHERED_BYTES:
            return self._ordered_sum(x)
        num_ranks = self.ranks.size
        gathered = self.all_gather(x.reshape(-1), [x.numel()] * num_ranks)
        return x.copy_(sum_of_parts(gathered.view(num_ranks, -1)).view(x.shape))
