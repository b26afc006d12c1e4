"""Buffers that the weights of streamed blocks take turns in, filled ahead of the blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn


class Filler(ABC):
    """Fills buffers with the weights of streamed blocks, which are numbered from 0."""

    @abstractmethod
    def fill(self, block: int, buffer: int) -> Any:
        """Begin to fill a buffer once the work on it is done, and return what ``wait`` takes."""

    @abstractmethod
    def wait(self, filling: Any) -> None:
        """Let what computes from now on see the buffer filled."""

    @abstractmethod
    def done(self, buffer: int) -> None:
        """Know that what was queued so far is the last work on what the buffer holds."""


class Ring:
    """Knows which block each buffer holds. A block always has the same one, at fixed addresses.

    When a block is done, its buffer is filled for the next block that has it, across the end of a
    step as well. A block that comes out of this order is waited for.
    """

    def __init__(self, filler: Filler, num_blocks: int, num_buffers: int) -> None:
        self.filler = filler
        self._count, self._buffers = num_blocks, num_buffers
        self._held: list[int] = list(range(num_buffers))
        self._fillings = [filler.fill(block, block) for block in range(num_buffers)]

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Let each of these blocks wait for its weights, and give its buffer up afterwards."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._entering(number))
            block.register_forward_hook(self._leaving(number))

    def enter(self, block: int) -> None:
        """Have the weights of a block in its buffer."""
        buffer = block % self._buffers
        if self._held[buffer] != block:
            self.filler.wait(self._fillings[buffer])
            self.filler.done(buffer)
            self._fill(block, buffer)
        self.filler.wait(self._fillings[buffer])

    def leave(self, block: int) -> None:
        """Fill the buffer of a block for the next one."""
        buffer = block % self._buffers
        following = block + self._buffers
        if following >= self._count:
            following = buffer
        if following != block:
            self.filler.done(buffer)
            self._fill(following, buffer)

    def _fill(self, block: int, buffer: int) -> None:
        self._held[buffer] = -1  # of no block, should filling fail
        self._fillings[buffer] = self.filler.fill(block, buffer)
        self._held[buffer] = block

    def _entering(self, number: int) -> Any:
        def enter(*_: object) -> None:
            self.enter(number)

        return enter

    def _leaving(self, number: int) -> Any:
        def leave(*_: object) -> None:
            self.leave(number)

        return leave
