"""All-reduce inside fused decoder blocks, through the shared memory of the ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._communicator import SharedMemoryCommunicator
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "BlockAllReduce",
    "hooked_module",
    "is_first_projection",
    "is_last_projection",
    "judge",
    "reduce_in_shared_memory",
]

_NAME = "shared_memory"
_OUTPUT, _DOWN = 1, 2  # bits of interposer_summand


def judge(request: Request) -> Verdict:
    """Accept a decoder block on one rank, or if the all-reduce uses shared memory."""
    communicator = request.dims.get("all_reduce", _NAME)
    if communicator != _NAME:
        return Verdict.refuse(f"all-reduces by {_NAME}, but {communicator} is chosen here")
    return native.judge(request)


def is_first_projection(projection: nn.Module) -> bool:
    """Check whether fused calls support a layer's first projection, such as gate_up or qkv."""
    return type(projection) in (MergedLinear, ColumnParallelLinear)


def is_last_projection(projection: nn.Module) -> bool:
    """Check whether fused calls support a layer's last projection, before any all-reduce."""
    return type(projection) in (Linear, RowParallelLinear)


def hooked_module(projection: nn.Module) -> Any:
    """Return the module on which the forward hooks of a projection's matmul run.

    In a ``RowParallelLinear`` these hooks run on the part before the all-reduce.
    """
    return projection.summand if type(projection) is RowParallelLinear else projection


class BlockAllReduce:
    """The two all-reduces of a decoder block: of the attention output and of the MLP output.

    Attributes:
        summand_bits: bits of interposer_summand: the results that are summed over ranks.
        communicator: None if no result is summed.
    """

    __slots__ = ("communicator", "summand_bits")

    def __init__(self, output: nn.Module | None, down: nn.Module | None) -> None:
        self.summand_bits = _OUTPUT * _is_summed(output) | _DOWN * _is_summed(down)
        self.communicator: SharedMemoryCommunicator | None = None
        for part in (output, down):
            if isinstance(part, RowParallelLinear):
                self.communicator = part.all_reduce.communicators[0]

    @property
    def address(self) -> int:
        """Address of the native communicator; 0 if no result is summed over ranks."""
        return 0 if self.communicator is None else self.communicator.address

    def check(self, lost: int) -> None:
        """Raise RankError if a fused call reported a lost rank."""
        if lost and self.communicator is not None:
            self.communicator.check("decoder block", lost)


def reduce_in_shared_memory(*projections: nn.Module) -> bool:
    """Check that one shared-memory communicator does every all-reduce of ``projections``."""
    # A projection can have two communicators, for small and for large results.
    pairs = [p.all_reduce.communicators for p in projections if isinstance(p, RowParallelLinear)]
    first = pairs[0][0] if pairs else None
    return all(type(c) is SharedMemoryCommunicator and c is first for pair in pairs for c in pair)


def _is_summed(projection: nn.Module | None) -> bool:
    return type(projection) is RowParallelLinear
