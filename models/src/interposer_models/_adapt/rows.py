"""Keys and values of one layer as rows of tokens, with room for more.

Dimensions: B sequences, K kv heads, U tokens, D head size, C tokens that there is room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 256


class Rows:
    """Two buffers ``[B, C, K, D]`` of which the tokens from ``start`` to ``end`` are held."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers = tuple(self._room(states, _LEAST) for states in (keys, values))
        self.start = self.end = 0

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.buffers[0].shape[0]

    @staticmethod
    def _room(states: Tensor, tokens: int) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_empty(batch, tokens, heads, size)

    def append(self, *states: Tensor) -> None:
        """Hold ``[B, K, U, D]`` of keys and of values behind the others."""
        length = states[0].shape[2]
        if self.end + length > self.buffers[0].shape[1]:
            self._make_room(length)
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[:, self.end : self.end + length] = new.transpose(1, 2)
        self.end += length

    def _make_room(self, length: int) -> None:
        held = self.end - self.start
        room = max(_LEAST, 2 * (held + length))
        moved = []
        for buffer in self.buffers:
            # Half of the room at least is free afterwards, so that a token is copied a few times.
            batch, _, heads, size = buffer.shape
            wider = buffer.new_empty(batch, room, heads, size)
            wider[:, :held] = buffer[:, self.start : self.end]
            moved.append(wider)
        self.buffers = tuple(moved)
        self.start, self.end = 0, held

    def views(self, start: int | None = None) -> tuple[Tensor, Tensor]:
        """Return ``[B, K, U, D]`` of keys and values, without a copy."""
        first = self.start if start is None else start
        keys, values = (b[:, first : self.end].transpose(1, 2) for b in self.buffers)
        return keys, values

    def select(self, index: Tensor) -> None:
        """Keep the sequences that ``index`` names, in its order."""
        device = self.buffers[0].device
        index = index.to(device)
        if torch.equal(index, torch.arange(self.buffers[0].shape[0], device=device)):
            return
        moved = []
        for buffer in self.buffers:
            _, room, heads, size = buffer.shape
            chosen = buffer.new_empty(len(index), room, heads, size)
            chosen[:, self.start : self.end] = buffer[:, self.start : self.end][index]
            moved.append(chosen)
        self.buffers = tuple(moved)


def rows_of(keys: Tensor, values: Tensor) -> Rows:
    """Return rows that hold ``[B, K, U, D]`` of keys and of values."""
    rows = Rows(keys, values)
    rows.append(keys, values)
    return rows
