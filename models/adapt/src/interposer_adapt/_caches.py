"""A KV cache for transformers models that grows in place and returns views of its buffers.

The cache layers of transformers copy all past tokens at every step. ``RowsCache`` holds rows of
tokens with spare capacity, the layout that ``ragged_attention`` reads. While only decoder blocks
use the cache, a layer holds the pages of an attention backend instead. Other code gets rows of
tokens: the position of each element in a page is found by storing numbers that encode an index.

Dimensions: B sequences, K kv heads, U tokens, D head size, C capacity in tokens, P pages, S page
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from interposer import AttentionBackend, AttentionBatch, Verdict

_MIN_CAPACITY_TOKENS = 256


class Rows:
    """Key and value buffers ``[B, C, K, D]`` that hold the tokens from ``start`` to ``end``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers = tuple(
            self._allocate(states, _MIN_CAPACITY_TOKENS) for states in (keys, values)
        )
        self.start = self.end = 0

    @property
    def batch(self) -> int:
        """Number of sequences in the buffers."""
        return self.buffers[0].shape[0]

    @staticmethod
    def _allocate(states: Tensor, tokens: int) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_empty(batch, tokens, heads, size)

    def append(self, *states: Tensor) -> None:
        """Append keys and values ``[B, K, U, D]`` to the buffers."""
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
        """Return views of all stored keys and values, ``[B, K, U, D]``."""
        view_start = self.start if start is None else start
        keys, values = (b[:, view_start : self.end].transpose(1, 2) for b in self.buffers)
        return keys, values

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences that ``indices`` selects, in that order."""
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
    """Return new ``Rows`` that contain the keys and values ``[B, K, U, D]``."""
    rows = Rows(keys, values)
    rows.append(keys, values)
    return rows


_MIN_TOKENS = 256
# Base of the digits that encode an index: every float dtype represents 0 to 127 exactly.
_BASE = 128


class PageIndex:
    """The position within a cache page of each element of the keys and values.

    Args:
        index: int64 ``[2 * K * S * D]``, keys before values.
    """

    def __init__(self, backend: AttentionBackend, index: Tensor) -> None:
        self.backend, self._index = backend, index
        spec = backend.spec
        self.page_size, self.dtype = spec.page_size, spec.dtype
        self._sizes = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
        self._axis = backend.kv_layout().page_axis

    def __deepcopy__(self, memo: object) -> PageIndex:
        return self

    def allocate(self, num_pages: int) -> Tensor:
        """Return an uninitialized KV cache of ``num_pages``."""
        (cache,) = self.backend.kv_layout().allocate(1, num_pages, str(self._index.device))
        return cache

    def first(self, cache: Tensor, num_pages: int) -> Tensor:
        """Return a view of the first ``num_pages`` pages of a cache."""
        return cache.narrow(self._axis, 0, num_pages)

    def select(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Return a new cache with copies of the selected pages."""
        chosen = self.allocate(len(pages))
        return chosen.copy_(cache.index_select(self._axis, pages))

    def read(self, cache: Tensor) -> Tensor:
        """Return the keys and values of a cache, ``[P, 2, K, S, D]``."""
        pages = cache.movedim(self._axis, 0).flatten(1)
        return pages[:, self._index].view(-1, *self._sizes)

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Store keys and values ``[P, 2, K, S, D]`` in the pages of a cache."""
        pages = cache.movedim(self._axis, 0)
        flat = pages.flatten(1).clone()
        flat[:, self._index] = rows.flatten(1)
        pages.copy_(flat.view(pages.shape))


def find_page_index(backend: AttentionBackend) -> PageIndex | Verdict:
    """Find the position within a backend's pages of each key and value element.

    Returns: a refusal if the pages store converted elements.
    """
    spec, layout = backend.spec, backend.kv_layout()
    if layout.dtype is not spec.dtype:
        return Verdict.refuse(f"its pages hold {layout.dtype}, which is not given back exactly")
    sizes = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
    numbers = torch.arange(2 * sizes[1] * sizes[2] * sizes[3]).view(sizes)
    (cache,) = layout.allocate(1, 1, "cpu")
    plan = backend.plan(uniform_batch(1, spec.page_size, 0, spec.page_size))
    query = torch.zeros(spec.page_size, spec.num_heads, spec.head_size, dtype=spec.dtype)
    decoded = torch.zeros(cache.numel(), dtype=torch.int64)
    # Each pass stores one base-128 digit of every element's index. Positions of a page that stay
    # negative hold no element.
    factor = 1
    while factor < numbers.numel():
        keys, values = (numbers // factor % _BASE).to(spec.dtype).transpose(1, 2).contiguous()
        cache.fill_(-1)
        backend.forward(query, keys, values, cache, plan)
        digits = cache.movedim(layout.page_axis, 0).flatten().long()
        decoded += torch.where(digits < 0, -numbers.numel() * _BASE, digits) * factor
        factor *= _BASE
    positions = (decoded >= 0).nonzero()[:, 0]
    if len(positions) != numbers.numel() or len(decoded[positions].unique()) != len(positions):
        return Verdict.refuse("its pages hold something else than keys and values")
    index = torch.empty_like(positions)
    index[decoded[positions]] = positions
    return PageIndex(backend, index)


def uniform_batch(batch: int, num_tokens: int, num_cached: int, page_size: int) -> AttentionBatch:
    """Return the attention batch of sequences that add ``num_tokens`` to ``num_cached`` tokens.

    Page p of sequence b is the page p * B + b of the cache, so that the cache grows at its end.
    """
    length = num_cached + num_tokens
    sequences = torch.arange(batch)[:, None]
    positions = torch.arange(num_cached, length)
    slots = (positions // page_size * batch + sequences) * page_size + positions % page_size
    return AttentionBatch(
        query_starts=torch.arange(0, batch * num_tokens + 1, num_tokens),
        seq_lens=torch.full((batch,), length),
        page_table=torch.arange(-(-length // page_size)) * batch + sequences,
        slots=slots.flatten(),
        max_query_tokens=num_tokens,
        max_seq_tokens=length,
    )


class Pages:
    """The paged keys and values of one layer.

    Attributes:
        cache: the pages, in the backend's layout.
        length: tokens of each sequence.
    """

    def __init__(self, index: PageIndex, batch: int) -> None:
        self.index, self.batch = index, batch
        self.length = self._capacity = 0
        self.cache: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return rows_of, self.read()

    def __deepcopy__(self, memo: object) -> Pages:
        twin = Pages(self.index, self.batch)
        twin.length, twin._capacity = self.length, self._capacity
        twin.cache = None if self.cache is None else self.cache.clone()
        return twin

    def reserve(self, num_tokens: int) -> None:
        """Grow the paged cache so that ``num_tokens`` more tokens of each sequence fit."""
        size, min_capacity_tokens = self.index.page_size, self.length + num_tokens
        if min_capacity_tokens <= self._capacity * size:
            return
        # Capacity at least doubles, so that each page is copied only a few times.
        capacity = -(-max(_MIN_TOKENS, 2 * min_capacity_tokens) // size)
        cache = self.index.allocate(capacity * self.batch)
        if self.length:
            num_pages = -(-self.length // size) * self.batch
            self.index.first(cache, num_pages).copy_(self.index.first(self.cache, num_pages))
        self.cache, self._capacity = cache, capacity

    def step(self, num_tokens: int) -> AttentionBatch:
        """Return the attention batch of a step that appends ``num_tokens`` to every sequence."""
        return uniform_batch(self.batch, num_tokens, self.length, self.index.page_size)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of all stored keys and values, ``[B, K, U, D]``."""
        size = self.index.page_size
        num_pages = -(-self.length // size)
        pages = self.index.read(self.index.first(self.cache, num_pages * self.batch))
        # [P, B, 2, K, S, D]
        paged = pages.unflatten(0, (num_pages, self.batch)).permute(2, 1, 3, 0, 4, 5)
        keys, values = paged.flatten(3, 4)[..., : self.length, :]
        return keys, values

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Replace the content of the pages by keys and values ``[B, K, U, D]``."""
        self.length = 0
        self.reserve(keys.shape[2])
        self.length, size = keys.shape[2], self.index.page_size
        num_pages = -(-self.length // size)
        both = torch.stack((keys, values))
        both = torch.nn.functional.pad(both, (0, 0, 0, num_pages * size - self.length))
        paged = both.unflatten(3, (num_pages, size)).permute(3, 1, 0, 2, 4, 5)
        self.index.write(self.index.first(self.cache, num_pages * self.batch), paged.flatten(0, 1))

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` tokens of each sequence."""
        self.length = length

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences that ``indices`` selects, in that order."""
        count = -(-self.length // self.index.page_size)
        pages = torch.arange(count)[:, None] * self.batch + indices.to("cpu")
        selected = Pages(self.index, len(indices))
        selected.reserve(self.length)
        num_pages = count * len(indices)
        copies = self.index.select(self.cache, pages.flatten())
        self.index.first(selected.cache, num_pages).copy_(copies)
        self.cache, self._capacity, self.batch = selected.cache, selected._capacity, selected.batch


class RowsLayer(DynamicLayer):
    """Cache layer of transformers that keeps the keys and values of every token.

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
        """Return the layer's content as ``Pages``; None if the layer must keep ``Rows``."""
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
        """Convert the layer's pages to rows permanently."""
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
        """Append keys and values of new tokens, and return views of all keys and values."""
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
        """Drop all cached tokens."""
        self.rows = None
        super().reset()
        self._looked_at = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the cached sequences by ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every cached sequence ``repeats`` times."""
        if self.get_seq_length() > 0 and self.rows is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the cached sequences that ``indices`` selects."""
        if self.get_seq_length() > 0 and self.rows is not None:
            if indices.dtype is torch.bool:
                indices = indices.nonzero()[:, 0]
            self.rows.select(indices)
            if isinstance(self.rows, Rows):
                self._update_views()

    def _current_rows(self, key_states: Tensor, value_states: Tensor) -> Rows:
        """Return the layer's rows, rebuilt first if user code replaced ``keys`` or ``values``."""
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
    """Cache layer of transformers that keeps the tokens of a sliding window."""

    is_sliding = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values of the given shapes."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; return views that start at the window of the first new token.

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
        """Drop the last tokens, and all tokens before the window of the last remaining token.

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
    """Return an empty KV cache for a model, with cross-attention for an encoder-decoder."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return EncoderDecoderCache(RowsCache(text), RowsCache(text))
    return RowsCache(text)
