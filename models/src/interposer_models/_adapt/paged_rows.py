"""A KV cache in a backend's pages, for batches of sequences of equal length.

A decoder block writes and reads the pages. Other code gets rows of tokens: the position of each
element in a page is found by storing numbers that encode an index.

Dimensions: B sequences, K kv heads, U tokens, D head size, P pages, S page size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, Verdict
from interposer_models._adapt.rows import rows_of

_MIN_TOKENS = 256
# Base of the digits that encode an index: every float dtype represents 0 to 127 exactly.
_BASE = 128


class PageIndex:
    """The position in a page of each key and value element.

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
        """Return an uninitialized cache of ``num_pages``."""
        (cache,) = self.backend.kv_layout().allocate(1, num_pages, str(self._index.device))
        return cache

    def first(self, cache: Tensor, num_pages: int) -> Tensor:
        """Return a view of the first pages of a cache."""
        return cache.narrow(self._axis, 0, num_pages)

    def select(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Return a new cache with copies of the given pages."""
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
    """Find the position of each key and value element in a backend's pages.

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
    """Return the batch in which each sequence appends ``num_tokens`` after ``num_cached`` tokens.

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
        cache: in the backend's layout.
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
        """Grow the cache so that ``num_tokens`` more tokens fit."""
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
        """Return the batch of a step that appends ``num_tokens`` to every sequence."""
        return uniform_batch(self.batch, num_tokens, self.length, self.index.page_size)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values, ``[B, K, U, D]``."""
        size = self.index.page_size
        num_pages = -(-self.length // size)
        pages = self.index.read(self.index.first(self.cache, num_pages * self.batch))
        # [P, B, 2, K, S, D]
        paged = pages.unflatten(0, (num_pages, self.batch)).permute(2, 1, 3, 0, 4, 5)
        keys, values = paged.flatten(3, 4)[..., : self.length, :]
        return keys, values

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Replace the content by keys and values ``[B, K, U, D]``."""
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
        """Keep only the sequences ``indices``, in that order."""
        count = -(-self.length // self.index.page_size)
        pages = torch.arange(count)[:, None] * self.batch + indices.to("cpu")
        selected = Pages(self.index, len(indices))
        selected.reserve(self.length)
        num_pages = count * len(indices)
        copies = self.index.select(self.cache, pages.flatten())
        self.index.first(selected.cache, num_pages).copy_(copies)
        self.cache, self._capacity, self.batch = selected.cache, selected._capacity, selected.batch
