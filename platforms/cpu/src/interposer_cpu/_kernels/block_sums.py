"""Sums over ranks inside of native blocks, through the memory that the ranks share."""

from __future__ import annotations

from typing import Any

from torch import nn

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._communicator import SharedMemoryCommunicator
from interposer_ops.layers.divided_linear import ColumnLinear, RowLinear
from interposer_ops.layers.linear import Linear, MergedLinear

__all__ = ["BlockSums", "are_shared", "is_first", "is_last", "judge", "product_of"]

_NAME = "shared_memory"
_OUTPUT, _DOWN = 1, 2  # of interposer_summand


def judge(request: Request) -> Verdict:
    """Accept a block whose sums over ranks native code can take, where there are ranks."""
    chosen = request.dims.get("all_reduce", _NAME)
    if chosen != _NAME:
        return Verdict.refuse(f"adds results of ranks up by {_NAME}, and {chosen} is chosen here")
    return native.judge(request)


def is_first(projection: nn.Module) -> bool:
    """Say whether fused calls may compute the first projection of a layer."""
    return type(projection) in (MergedLinear, ColumnLinear)


def is_last(projection: nn.Module) -> bool:
    """Say whether fused calls may compute the last projection of a layer, up to its sum."""
    return type(projection) in (Linear, RowLinear)


def product_of(projection: nn.Module) -> Any:
    """Return what forward hooks on the product of a projection stand on."""
    return projection.summand if type(projection) is RowLinear else projection


class BlockSums:
    """The sums of a block, and what takes them.

    Attributes:
        words: of interposer_block, which results are summands.
        communicator: None where there are none.
    """

    __slots__ = ("communicator", "words")

    def __init__(self, output: nn.Module | None, down: nn.Module | None) -> None:
        self.words = _OUTPUT * _sums(output) | _DOWN * _sums(down)
        self.communicator: SharedMemoryCommunicator | None = None
        for part in (output, down):
            if isinstance(part, RowLinear):
                self.communicator = part.reduce_alone.communicators[0]

    @property
    def address(self) -> int:
        """Of the interposer_communicator, 0 without."""
        return 0 if self.communicator is None else self.communicator.address

    def check(self, lost: int) -> None:
        """Raise RankError where a rank was lost in a fused call."""
        if lost and self.communicator is not None:
            self.communicator.check("decoder block", lost)


def are_shared(*projections: nn.Module) -> bool:
    """Say whether native code can add up what ``projections`` return, whatever its size."""
    held = [p.reduce_alone.communicators for p in projections if isinstance(p, RowLinear)]
    first = held[0][0] if held else None
    return all(type(c) is SharedMemoryCommunicator and c is first for pair in held for c in pair)


def _sums(projection: nn.Module | None) -> bool:
    return type(projection) is RowLinear
