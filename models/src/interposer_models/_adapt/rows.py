"""Keys and values of one layer as rows of tokens, with spare capacity.

Dimensions: B sequences, K kv heads, U tokens, D head size, C capacity in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_CAPACITY_TOKENS = 256


class Rows:
    """Two buffers ``[B, C, K, D]`` that hold the tokens from ``start`` to ``end``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers = tuple(
            self._allocate(states, _MIN_CAPACITY_TOKENS) for states in (keys, values)
        )
        self.start = self.end = 0

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.buffers[0].shape[0]

    @staticmethod
    def _allocate(states: Tensor, tokens: int) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_empty(batch, tokens, heads, size)

    def append(self, *states: Tensor) -> None:
        """Append keys and values ``[B, K, U, D]``."""
        length = states[0].shape[2]
        if self.end + length > self.buffers[0].shape[1]:
            self._grow(length)
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[:, self.end : self.end + length] = new.transpose(1, 2)
        self.end += length

    def _grow(self, length: int) -> None:
        num_tokens = self.end - self.start
        capacity = max(_MIN_CAPACITY_TOKENS, 2 * (num_tokens + length))
        buffers = []
        for buffer in self.buffers:
            # Capacity at least doubles, so that each token is copied only a few times.
            batch, _, heads, size = buffer.shape
            wider = buffer.new_empty(batch, capacity, heads, size)
            wider[:, :num_tokens] = buffer[:, self.start : self.end]
            buffers.append(wider)
        self.buffers = tuple(buffers)
        self.start, self.end = 0, num_tokens

    def views(self, start: int | None = None) -> tuple[Tensor, Tensor]:
        """Return views of keys and values, ``[B, K, U, D]``."""
        view_start = self.start if start is None else start
        keys, values = (b[:, view_start : self.end].transpose(1, 2) for b in self.buffers)
        return keys, values

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences ``indices``, in that order."""
        device = self.buffers[0].device
        indices = indices.to(device)
        if torch.equal(indices, torch.arange(self.buffers[0].shape[0], device=device)):
            return
        buffers = []
        for buffer in self.buffers:
            _, capacity, heads, size = buffer.shape
            selected = buffer.new_empty(len(indices), capacity, heads, size)
            selected[:, self.start : self.end] = buffer[:, self.start : self.end][indices]
            buffers.append(selected)
        self.buffers = tuple(buffers)


def rows_of(keys: Tensor, values: Tensor) -> Rows:
    """Return rows with the keys and values ``[B, K, U, D]``."""
    rows = Rows(keys, values)
    rows.append(keys, values)
    return rows
