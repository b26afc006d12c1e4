"""A cache of keys and values that grows in place and returns views.

The layers of transformers copy all past tokens at every step. These hold rows of tokens, the layout
that ``ragged_attention`` reads, with room for more.

Dimensions: B sequences, K kv heads, U tokens, D head size, C tokens that there is room for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

_LEAST = 256


class _Rows:
    """Two buffers ``[B, C, K, D]`` of which the tokens from ``start`` to ``end`` are held."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers = tuple(self._room(states, _LEAST) for states in (keys, values))
        self.start = self.end = 0

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


class RowsLayer(DynamicLayer):
    """A layer that keeps every token."""

    rows: _Rows | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers for keys and values of these sizes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = _Rows(key_states, value_states)
        self.is_initialized = True
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens, and return all."""
        rows = self._own(key_states, value_states)
        rows.append(key_states, value_states)
        return self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of which a negative number says how many."""
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.rows is not None:
            self.rows.end = max(self.rows.end - abs(tokens_to_remove), self.rows.start)
            self._show()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.rows = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence go on from the one that ``beam_idx`` names."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.get_seq_length() > 0 and self.rows is not None:
            batch = self.rows.buffers[0].shape[0]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences that ``indices`` name."""
        if self.get_seq_length() > 0 and self.rows is not None:
            if indices.dtype is torch.bool:
                indices = indices.nonzero()[:, 0]
            self.rows.select(indices)
            self._show()

    def _own(self, key_states: Tensor, value_states: Tensor) -> _Rows:
        """Return the rows, which take over what somebody set in their place."""
        if not self.is_initialized or self.rows is None:
            held = (self.keys, self.values) if self.is_initialized else None
            self.lazy_initialization(key_states, value_states)
            if held is not None and held[0] is not None and held[0].numel():
                assert self.rows is not None
                assert held[1] is not None
                self.rows.append(held[0], held[1])
        elif self.keys is not self._shown[0] or self.values is not self._shown[1]:
            assert self.keys is not None
            assert self.values is not None
            self.rows = _Rows(self.keys, self.values)
            self.rows.append(self.keys, self.values)
        assert self.rows is not None
        return self.rows

    def _show(self) -> tuple[Tensor, Tensor]:
        """Let everybody see what is held."""
        assert self.rows is not None
        self.keys, self.values = self._shown = self.rows.views()
        return self._shown


class RowsSlidingLayer(RowsLayer, DynamicSlidingWindowLayer):
    """A layer that keeps the tokens of a window."""

    is_sliding = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers for keys and values of these sizes."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens, return the window of the first of them, and keep the last's."""
        rows = self._own(key_states, value_states)
        rows.append(key_states, value_states)
        length = key_states.shape[-2]
        self.cumulative_length += length
        seen = rows.views(max(rows.start, rows.end - length - self.sliding_window + 1))
        if not self.record_past:
            rows.start = max(rows.start, rows.end - self.sliding_window + 1)
        self._show()
        return seen

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, and those that no window reaches any more.

        Raises: RuntimeError: what the window would need then is forgotten already.
        """
        removed = abs(tokens_to_remove)
        full = self.get_seq_length() >= self.sliding_window
        if full and not self.record_past:
            raise RuntimeError(
                f"crop({tokens_to_remove}) needs tokens that left the window of "
                f"{self.sliding_window}. Try: activate_past_recording() before the first step"
            )
        if self.rows is None:
            return
        self.rows.end = max(self.rows.end - removed, self.rows.start)
        self.cumulative_length = max(self.cumulative_length - removed, 0)
        self.rows.start = max(self.rows.start, self.rows.end - self.sliding_window + 1)
        self._show()

    def get_seq_length(self) -> int:
        """Return the number of tokens that were seen."""
        return int(self.cumulative_length)


class RowsCache(DynamicCache):
    """A ``DynamicCache`` whose plain and sliding layers grow in place; others stay as they are."""

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = RowsLayer
        self.layers = [_in_rows(layer) for layer in self.layers]


def _in_rows(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        kind: Any = RowsLayer
        return kind()
    if type(layer) is DynamicSlidingWindowLayer:
        return RowsSlidingLayer(layer.sliding_window)
    return layer


def new_cache(config: PretrainedConfig) -> Cache:
    """Return an empty cache for a model, with one for its cross attention if it has any."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return EncoderDecoderCache(RowsCache(text), RowsCache(text))
    return RowsCache(text)
