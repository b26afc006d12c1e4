"""A KV cache that grows in place and returns views.

The cache layers of transformers copy all past tokens at every step. The layers here hold rows of
tokens, the layout that ``ragged_attention`` reads, with spare capacity.

Dimensions: B sequences, K kv heads, U tokens, D head size, C capacity in tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from interposer_models._adapt.paged_rows import PageIndex, Pages
from interposer_models._adapt.rows import Rows, rows_of


class RowsLayer(DynamicLayer):
    """A cache layer that keeps every token.

    The layer holds pages while only a decoder block uses the cache. Reading ``keys`` or ``values``
    converts the layer to rows for good, so that writes to both tensors take effect.
    """

    rows: Rows | Pages | None = None
    _keys: Tensor | None = None
    _values: Tensor | None = None
    _looked_at = False

    @property
    def keys(self) -> Tensor | None:
        """The keys of all cached tokens, ``[B, K, U, D]``."""
        self._convert_to_rows()
        return self._keys

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._convert_to_rows()
        self._keys = value

    @property
    def values(self) -> Tensor | None:
        """The values of all cached tokens, ``[B, K, U, D]``."""
        self._convert_to_rows()
        return self._values

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._convert_to_rows()
        self._values = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not isinstance(self.rows, Rows):
            return
        if self._keys is None:  # pickled as pages
            self._update_views()
        elif self._keys is self._shown[0] and self._values is self._shown[1]:
            # Unpickled views no longer share memory with the buffers.
            self._update_views()

    def pages(self, index: PageIndex, batch: int) -> Pages | None:
        """Return the layer's content as pages, None if the layer must stay in rows."""
        content = self.rows
        if isinstance(content, Pages):
            return content if content.index is index and content.batch == batch else None
        if self._looked_at:
            return None
        pages = Pages(index, batch)
        if self.is_initialized:
            # Code of the user replaced the tensors: keep its tensors as rows.
            if (
                content is None
                or self._keys is not self._shown[0]
                or self._values is not self._shown[1]
            ):
                return None
            if self._shown[0].shape[2]:
                if self._shown[0].shape[0] != batch or self._shown[0].dtype is not index.dtype:
                    return None
                pages.fill(*self._shown)
        self.dtype, self.device = index.dtype, torch.device("cpu")
        self.is_initialized, self.rows = True, pages
        # Views of the former rows would become stale with the next step.
        self._keys = self._values = None
        return pages

    def _convert_to_rows(self) -> None:
        """Convert pages to rows for good."""
        if isinstance(self.rows, Pages):
            self._looked_at = True
            self.rows = rows_of(*self.rows.read()) if self.rows.length else None
            if self.rows is None:
                self.is_initialized = False
            else:
                self._update_views()

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        if isinstance(self.rows, Pages):
            return self.rows.length
        return super().get_seq_length()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values of the given shapes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = Rows(key_states, value_states)
        self.is_initialized = True
        self._update_views()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens, and return views of all tokens."""
        rows = self._current_rows(key_states, value_states)
        rows.append(key_states, value_states)
        return self._update_views()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens."""
        if isinstance(self.rows, Pages) and tokens_to_remove <= 0:
            self.rows.truncate(max(self.rows.length + tokens_to_remove, 0))
            return
        super().crop(tokens_to_remove)
        if tokens_to_remove and isinstance(self.rows, Rows):
            self.rows.end = max(self.rows.end - abs(tokens_to_remove), self.rows.start)
            self._update_views()

    def reset(self) -> None:
        """Drop all tokens."""
        self.rows = None
        super().reset()
        self._looked_at = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence by the one that ``beam_idx`` names."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        if self.get_seq_length() > 0 and self.rows is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences in ``indices``."""
        if self.get_seq_length() > 0 and self.rows is not None:
            if indices.dtype is torch.bool:
                indices = indices.nonzero()[:, 0]
            self.rows.select(indices)
            if isinstance(self.rows, Rows):
                self._update_views()

    def _current_rows(self, key_states: Tensor, value_states: Tensor) -> Rows:
        """Return the rows, rebuilt from keys and values that code of the user replaced."""
        self._convert_to_rows()
        if not self.is_initialized or self.rows is None:
            previous = (self.keys, self.values) if self.is_initialized else None
            self.lazy_initialization(key_states, value_states)
            if previous is not None and previous[0] is not None and previous[0].numel():
                assert isinstance(self.rows, Rows)
                assert previous[1] is not None
                self.rows.append(previous[0], previous[1])
        # Code of the user, such as a beam search, may assign new tensors to keys and values.
        elif self.keys is not self._shown[0] or self.values is not self._shown[1]:
            assert self.keys is not None
            assert self.values is not None
            self.rows = rows_of(self.keys, self.values)
        assert isinstance(self.rows, Rows)
        return self.rows

    def _update_views(self) -> tuple[Tensor, Tensor]:
        """Set ``keys`` and ``values`` to views of the rows."""
        assert isinstance(self.rows, Rows)
        self._keys, self._values = self._shown = self.rows.views()
        return self._shown


class RowsSlidingLayer(RowsLayer, DynamicSlidingWindowLayer):
    """A cache layer that keeps the tokens of a sliding window."""

    is_sliding = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values of the given shapes."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens, and return views that start at the first new token's window.

        Only the window of the last token is kept.
        """
        rows = self._current_rows(key_states, value_states)
        rows.append(key_states, value_states)
        length = key_states.shape[-2]
        self.cumulative_length += length
        visible = rows.views(max(rows.start, rows.end - length - self.sliding_window + 1))
        if not self.record_past:
            rows.start = max(rows.start, rows.end - self.sliding_window + 1)
        self._update_views()
        return visible

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, and tokens before the window of the new last token.

        Raises: RuntimeError: tokens that the window would need are gone already.
        """
        removed = abs(tokens_to_remove)
        full = self.get_seq_length() >= self.sliding_window
        if full and not self.record_past:
            raise RuntimeError(
                f"crop({tokens_to_remove}) needs tokens that left the window of "
                f"{self.sliding_window}. Try: activate_past_recording() before the first step"
            )
        if not isinstance(self.rows, Rows):
            return
        self.rows.end = max(self.rows.end - removed, self.rows.start)
        self.cumulative_length = max(self.cumulative_length - removed, 0)
        self.rows.start = max(self.rows.start, self.rows.end - self.sliding_window + 1)
        self._update_views()

    def get_seq_length(self) -> int:
        """Return the number of tokens appended so far."""
        return int(self.cumulative_length)


class RowsCache(DynamicCache):
    """A ``DynamicCache`` with plain and sliding layers that grow in place."""

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = RowsLayer
        self.layers = [_rows_layer(layer) for layer in self.layers]


def _rows_layer(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        layer_class: Any = RowsLayer
        return layer_class()
    if type(layer) is DynamicSlidingWindowLayer:
        return RowsSlidingLayer(layer.sliding_window)
    return layer


def new_cache(config: PretrainedConfig) -> Cache:
    """Return an empty cache for a model, including cross attention for an encoder-decoder."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return EncoderDecoderCache(RowsCache(text), RowsCache(text))
    return RowsCache(text)
