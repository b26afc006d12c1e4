"""A ring of buffers for the weights of streamed blocks, filled ahead of the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn


class Filler(ABC):
    """Fills buffers with the weights of streamed blocks, which are numbered from 0."""

    @abstractmethod
    def fill(self, block: int, buffer: int) -> Any:
        """Start to fill a buffer after the last use, and return the handle for ``wait``."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Let subsequent computation wait until the buffer is filled."""

    @abstractmethod
    def done(self, buffer: int) -> None:
        """Record that the work queued so far is the last that uses the content of the buffer."""


class Ring:
    """Assigns buffers to streamed blocks. A block always uses the same buffer, at fixed addresses.

    When a block has been computed, its buffer is filled for the next block that uses it, which may
    belong to the next step. A block that is computed out of order waits for the weights.
    """

    def __init__(self, filler: Filler, num_blocks: int, num_buffers: int) -> None:
        self.filler = filler
        self._num_blocks, self._num_buffers = num_blocks, num_buffers
        self._block_of: list[int] = list(range(num_buffers))
        # Start at once with the first blocks of the first step.
        self._handles = [filler.fill(block, block) for block in range(num_buffers)]

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Register hooks that wait for each block's weights, and release the buffer afterwards."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._entering(number))
            block.register_forward_hook(self._leaving(number))

    def enter(self, block: int) -> None:
        """Wait until the weights of a block are in its buffer."""
        buffer = block % self._num_buffers
        if self._block_of[buffer] != block:  # computed out of order
            self.filler.wait(self._handles[buffer])
            self.filler.done(buffer)
            self._fill(block, buffer)
        self.filler.wait(self._handles[buffer])

    def leave(self, block: int) -> None:
        """Fill the buffer of a block for the next block that uses it."""
        buffer = block % self._num_buffers
        following = block + self._num_buffers
        if following >= self._num_blocks:
            following = buffer  # the first block of the next step
        if following != block:
            self.filler.done(buffer)
            self._fill(following, buffer)

    def _fill(self, block: int, buffer: int) -> None:
        self._block_of[buffer] = -1  # valid if filling fails
        self._handles[buffer] = self.filler.fill(block, buffer)
        self._block_of[buffer] = block

    def _entering(self, number: int) -> Any:
        def enter(*_: object) -> None:
            self.enter(number)

        return enter

    def _leaving(self, number: int) -> Any:
        def leave(*_: object) -> None:
            self.leave(number)

        return leave
