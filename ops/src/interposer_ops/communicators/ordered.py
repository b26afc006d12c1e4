"""Sums whose bits depend neither on the backend nor on what stands beside an element.

Dimensions: N ranks.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from interposer_ops.communicators.portable import TorchCommunicator, sum_of_parts

__all__ = ["OrderedCommunicator"]

# Up to here one message of all is faster than two of a share each.
_MOST_GATHERED_BYTES = 64 << 10


class OrderedCommunicator(TorchCommunicator):
    """The collectives of ``TorchCommunicator`` with sums in the order of the ranks, in float32.

    A backend splits a tensor into pieces and begins each with another rank, so that an element
    of a larger batch is rounded differently. Here it is not.
    """

    in_place: ClassVar[bool] = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``, which holds the sum over the ranks, rounded once."""
        if x.nbytes > _MOST_GATHERED_BYTES:
            return self._ordered_sum(x)
        num = self.ranks.size
        found = self.all_gather(x.reshape(-1), [x.numel()] * num)
        return x.copy_(sum_of_parts(found.view(num, -1)).view(x.shape))
