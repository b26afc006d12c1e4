"""A cache of keys and values in the pages of a backend, for batches of sequences of one length.

A block that is computed at once writes and reads pages. Whoever looks at keys and values gets rows:
where a backend puts each number of a page is found by writing numbers that tell it.

Dimensions: B sequences, K kv heads, U tokens, D head size, P pages, S page size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, Verdict
from interposer_models._adapt.rows import rows_of

_LEAST = 256
# Digits that every float dtype holds exactly.
_BASE = 128


class PageRows:
    """The place in a page of each number of the keys and values that it holds.

    Args:
        index: int64 ``[2 * K * S * D]``, of keys before values.
    """

    def __init__(self, backend: AttentionBackend, index: Tensor) -> None:
        self.backend, self._index = backend, index
        spec = backend.spec
        self.page_size, self.dtype = spec.page_size, spec.dtype
        self._sizes = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
        self._axis = backend.kv_layout().page_axis

    def __deepcopy__(self, memo: object) -> PageRows:
        return self

    def allocate(self, num_pages: int) -> Tensor:
        """Return a cache without content."""
        (cache,) = self.backend.kv_layout().allocate(1, num_pages, str(self._index.device))
        return cache

    def first(self, cache: Tensor, num_pages: int) -> Tensor:
        """Return the first pages of a cache."""
        return cache.narrow(self._axis, 0, num_pages)

    def select(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Return a cache of copies of these pages."""
        chosen = self.allocate(len(pages))
        return chosen.copy_(cache.index_select(self._axis, pages))

    def read(self, cache: Tensor) -> Tensor:
        """Return ``[P, 2, K, S, D]`` of a cache."""
        pages = cache.movedim(self._axis, 0).flatten(1)
        return pages[:, self._index].view(-1, *self._sizes)

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Store ``[P, 2, K, S, D]`` in the pages of a cache."""
        pages = cache.movedim(self._axis, 0)
        flat = pages.flatten(1).clone()
        flat[:, self._index] = rows.flatten(1)
        pages.copy_(flat.view(pages.shape))


def find_rows(backend: AttentionBackend) -> PageRows | Verdict:
    """Return where a backend stores what it is given, found by a page of numbers.

    Returns: a refusal where pages hold something else than these.
    """
    spec, layout = backend.spec, backend.kv_layout()
    if layout.dtype is not spec.dtype:
        return Verdict.refuse(f"its pages hold {layout.dtype}, which is not given back exactly")
    sizes = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
    numbers = torch.arange(2 * sizes[1] * sizes[2] * sizes[3]).view(sizes)
    (cache,) = layout.allocate(1, 1, "cpu")
    plan = backend.plan(batch_of(1, spec.page_size, 0, spec.page_size))
    query = torch.zeros(spec.page_size, spec.num_heads, spec.head_size, dtype=spec.dtype)
    found = torch.zeros(cache.numel(), dtype=torch.int64)
    factor = 1
    while factor < numbers.numel():
        keys, values = (numbers // factor % _BASE).to(spec.dtype).transpose(1, 2).contiguous()
        cache.fill_(-1)
        backend.forward(query, keys, values, cache, plan)
        digits = cache.movedim(layout.page_axis, 0).flatten().long()
        found += torch.where(digits < 0, -numbers.numel() * _BASE, digits) * factor
        factor *= _BASE
    places = (found >= 0).nonzero()[:, 0]
    if len(places) != numbers.numel() or len(found[places].unique()) != len(places):
        return Verdict.refuse("its pages hold something else than keys and values")
    index = torch.empty_like(places)
    index[found[places]] = places
    return PageRows(backend, index)


def batch_of(batch: int, num_tokens: int, before: int, page_size: int) -> AttentionBatch:
    """Return the batch in which each sequence gets so many tokens after those before.

    Page p of sequence b is the page p * B + b, so that a cache grows at its end.
    """
    length = before + num_tokens
    sequences = torch.arange(batch)[:, None]
    places = torch.arange(before, length)
    slots = (places // page_size * batch + sequences) * page_size + places % page_size
    return AttentionBatch(
        query_starts=torch.arange(0, batch * num_tokens + 1, num_tokens),
        seq_lens=torch.full((batch,), length),
        page_table=torch.arange(-(-length // page_size)) * batch + sequences,
        slots=slots.flatten(),
        max_query_tokens=num_tokens,
        max_seq_tokens=length,
    )


class Pages:
    """The keys and values of one layer.

    Attributes:
        cache: of the backend's layout.
        length: tokens of each sequence.
    """

    def __init__(self, rows: PageRows, batch: int) -> None:
        self.rows, self.batch = rows, batch
        self.length = self._capacity = 0
        self.cache: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return rows_of, self.read()

    def __deepcopy__(self, memo: object) -> Pages:
        twin = Pages(self.rows, self.batch)
        twin.length, twin._capacity = self.length, self._capacity
        twin.cache = None if self.cache is None else self.cache.clone()
        return twin

    def reserve(self, num_tokens: int) -> None:
        """Make room for so many tokens more."""
        size, needed = self.rows.page_size, self.length + num_tokens
        if needed <= self._capacity * size:
            return
        # Half of the room at least is free afterwards, so that a page is copied a few times.
        capacity = -(-max(_LEAST, 2 * needed) // size)
        cache = self.rows.allocate(capacity * self.batch)
        if self.length:
            held = -(-self.length // size) * self.batch
            self.rows.first(cache, held).copy_(self.rows.first(self.cache, held))
        self.cache, self._capacity = cache, capacity

    def step(self, num_tokens: int) -> AttentionBatch:
        """Return the batch of a step in which every sequence gets so many tokens."""
        return batch_of(self.batch, num_tokens, self.length, self.rows.page_size)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies ``[B, K, U, D]`` of keys and values."""
        size = self.rows.page_size
        count = -(-self.length // size)
        pages = self.rows.read(self.rows.first(self.cache, count * self.batch))
        # [P, B, 2, K, S, D]
        apart = pages.unflatten(0, (count, self.batch)).permute(2, 1, 3, 0, 4, 5)
        keys, values = apart.flatten(3, 4)[..., : self.length, :]
        return keys, values

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Hold ``[B, K, U, D]`` of keys and of values, and nothing before them."""
        self.length = 0
        self.reserve(keys.shape[2])
        self.length, size = keys.shape[2], self.rows.page_size
        count = -(-self.length // size)
        both = torch.stack((keys, values))
        both = torch.nn.functional.pad(both, (0, 0, 0, count * size - self.length))
        apart = both.unflatten(3, (count, size)).permute(3, 1, 0, 2, 4, 5)
        self.rows.write(self.rows.first(self.cache, count * self.batch), apart.flatten(0, 1))

    def truncate(self, length: int) -> None:
        """Forget all but so many tokens of each sequence."""
        self.length = length

    def select(self, index: Tensor) -> None:
        """Keep the sequences that ``index`` names, in its order."""
        count = -(-self.length // self.rows.page_size)
        pages = torch.arange(count)[:, None] * self.batch + index.to("cpu")
        chosen = Pages(self.rows, len(index))
        chosen.reserve(self.length)
        held = count * len(index)
        copies = self.rows.select(self.cache, pages.flatten())
        self.rows.first(chosen.cache, held).copy_(copies)
        self.cache, self._capacity, self.batch = chosen.cache, chosen._capacity, chosen.batch
