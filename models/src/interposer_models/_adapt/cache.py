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

from interposer_models._adapt.paged_rows import PageRows, Pages
from interposer_models._adapt.rows import Rows, rows_of


class RowsLayer(DynamicLayer):
    """A layer that keeps every token.

    It holds pages as long as a block that is computed at once alone uses it. Whoever looks at its
    keys and values lets it hold rows from then on, so that what he writes to them counts.
    """

    rows: Rows | Pages | None = None
    _keys: Tensor | None = None
    _values: Tensor | None = None
    _looked_at = False

    @property
    def keys(self) -> Tensor | None:
        """``[B, K, U, D]``."""
        self._look()
        return self._keys

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._look()
        self._keys = value

    @property
    def values(self) -> Tensor | None:
        """``[B, K, U, D]``."""
        self._look()
        return self._values

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._look()
        self._values = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not isinstance(self.rows, Rows):
            return
        if self._keys is None:  # they were pages
            self._show()
        elif self._keys is self._shown[0] and self._values is self._shown[1]:
            # Views that were pickled are tensors of their own.
            self._show()

    def pages(self, rows: PageRows, batch: int) -> Pages | None:
        """Return pages of a backend with all that is held; None where it has to stay in rows."""
        held = self.rows
        if isinstance(held, Pages):
            return held if held.rows is rows and held.batch == batch else None
        if self._looked_at:
            return None
        pages = Pages(rows, batch)
        if self.is_initialized:
            # Rows that somebody set in place of the others are his.
            if (
                held is None
                or self._keys is not self._shown[0]
                or self._values is not self._shown[1]
            ):
                return None
            if self._shown[0].shape[2]:
                if self._shown[0].shape[0] != batch or self._shown[0].dtype is not rows.dtype:
                    return None
                pages.fill(*self._shown)
        self.dtype, self.device = rows.dtype, torch.device("cpu")
        self.is_initialized, self.rows = True, pages
        self._keys = self._values = None
        return pages

    def _look(self) -> None:
        """Hold rows from now on."""
        if isinstance(self.rows, Pages):
            self._looked_at = True
            self.rows = rows_of(*self.rows.read()) if self.rows.length else None
            if self.rows is None:
                self.is_initialized = False
            else:
                self._show()

    def get_seq_length(self) -> int:
        """Return the number of tokens that are held."""
        if isinstance(self.rows, Pages):
            return self.rows.length
        return super().get_seq_length()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers for keys and values of these sizes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = Rows(key_states, value_states)
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
        if isinstance(self.rows, Pages) and tokens_to_remove <= 0:
            self.rows.truncate(max(self.rows.length + tokens_to_remove, 0))
            return
        super().crop(tokens_to_remove)
        if tokens_to_remove and isinstance(self.rows, Rows):
            self.rows.end = max(self.rows.end - abs(tokens_to_remove), self.rows.start)
            self._show()

    def reset(self) -> None:
        """Forget everything."""
        self.rows = None
        super().reset()
        self._looked_at = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence go on from the one that ``beam_idx`` names."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.get_seq_length() > 0 and self.rows is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences that ``indices`` name."""
        if self.get_seq_length() > 0 and self.rows is not None:
            if indices.dtype is torch.bool:
                indices = indices.nonzero()[:, 0]
            self.rows.select(indices)
            if isinstance(self.rows, Rows):
                self._show()

    def _own(self, key_states: Tensor, value_states: Tensor) -> Rows:
        """Return the rows, which take over what somebody set in their place."""
        self._look()
        if not self.is_initialized or self.rows is None:
            held = (self.keys, self.values) if self.is_initialized else None
            self.lazy_initialization(key_states, value_states)
            if held is not None and held[0] is not None and held[0].numel():
                assert isinstance(self.rows, Rows)
                assert held[1] is not None
                self.rows.append(held[0], held[1])
        elif self.keys is not self._shown[0] or self.values is not self._shown[1]:
            assert self.keys is not None
            assert self.values is not None
            self.rows = rows_of(self.keys, self.values)
        assert isinstance(self.rows, Rows)
        return self.rows

    def _show(self) -> tuple[Tensor, Tensor]:
        """Let everybody see what is held."""
        assert isinstance(self.rows, Rows)
        self._keys, self._values = self._shown = self.rows.views()
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
        if not isinstance(self.rows, Rows):
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
