"""Memory that running sequences share: pools of KV-cache pages and state slots, with copies.

``PagePool`` hands out page and slot numbers. ``CacheContents`` addresses the tensors behind the
numbers, and ``StateCheckpoints`` keeps copies of recurrent states.

Dimensions: N slots.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interposer.errors import ContextLengthError


class PagePool:
    """Allocator of KV-cache pages and state slots: the lowest free number first.

    Args:
        num_slots: Number of state slots, one per sequence; 0 if the model keeps no states.
        seen_tokens: Window of the layers that use the pages: the number of tokens that a token
            attends to, including the token; None for full attention.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int = 0, seen_tokens: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.seen_tokens = seen_tokens
        self._free: list[int] = []  # heap of the pages that were returned
        self._first_new = 0  # pages from this number on were never handed out
        self._free_slots = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free) + self.num_pages - self._first_new

    @property
    def zero_page(self) -> int:
        """Number of the zero-filled page after the last one, which replaces freed pages."""
        return self.num_pages

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The state slots that no sequence holds."""
        return tuple(self._free_slots)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def longest(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens a sequence can have if alone in the pool."""
        window = self.seen_tokens
        if window is not None and window_pages(window, self.page_size) <= self.num_pages:
            return num_tokens
        return min(num_tokens, self.num_pages * self.page_size)

    def step_capacity(self, num_computed: int, num_pages: int) -> int:
        """Return how many tokens a sequence can add in one step, given the free pages.

        Args:
            num_pages: Most pages that the sequence may hold in that step.
        """
        return (self.num_unseen_pages(num_computed) + num_pages) * self.page_size - num_computed

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow ``pages`` to hold ``num_tokens`` tokens; return False if too few pages are free."""
        num_missing = self.pages_for(num_tokens) - len(pages)
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            if self._free:
                pages.append(heapq.heappop(self._free))
            else:
                pages.append(self._first_new)
                self._first_new += 1
        return True

    def shrink(self, pages: list[int], num_tokens: int) -> None:
        """Free the pages of a sequence after those that hold ``num_tokens`` tokens."""
        surplus = pages[self.pages_for(num_tokens) :]
        del pages[len(pages) - len(surplus) :]
        self.release(surplus)

    def trim(self, pages: list[int], num_computed: int) -> None:
        """Free pages that no later token attends to, and put the zero page in their place."""
        # Walk backwards: all pages before one that was freed earlier are freed already.
        for index in range(self.num_unseen_pages(num_computed) - 1, -1, -1):
            if pages[index] == self.zero_page:
                return
            self._take_back(pages[index])
            pages[index] = self.zero_page

    def release(self, pages: list[int]) -> None:
        """Free all pages in the list ``pages``, and empty the list."""
        # In reverse order the first pages of the sequence are released last and evicted last.
        for page in reversed(pages):
            if page != self.zero_page:
                self._take_back(page)
        pages.clear()

    def take_slot(self) -> int:
        """Take the lowest free state slot; return -1 if none is free."""
        return heapq.heappop(self._free_slots) if self._free_slots else -1

    def return_slot(self, slot: int) -> None:
        """Free a state slot; do nothing for -1."""
        if slot >= 0:
            heapq.heappush(self._free_slots, slot)

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if ``num_tokens`` tokens do not fit even into an idle pool."""
        if self.longest(num_tokens) < num_tokens:
            raise ContextLengthError(
                f"The request needs {num_tokens} cached tokens, the cache holds "
                f"{self.num_pages * self.page_size}. Try: load(..., cache_tokens={num_tokens})"
            )

    def num_unseen_pages(self, num_computed: int) -> int:
        """Return the number of leading pages outside the attention window of all later tokens."""
        if self.seen_tokens is None:
            return 0
        return max(0, num_computed - self.seen_tokens + 1) // self.page_size

    def _take_back(self, page: int) -> None:
        heapq.heappush(self._free, page)


def window_pages(seen_tokens: int, page_size: int) -> int:
    """Return the largest number of pages that ``seen_tokens`` consecutive tokens can occupy."""
    return -(-(seen_tokens - 1) // page_size) + 1


States = Sequence[tuple[Tensor, ...]]
"""For each recurrent layer, the tensors ``[N, ...]`` of its ``StateLayout``."""


def copy_rows(
    source: States, source_rows: Sequence[int], target: States, target_rows: Sequence[int]
) -> None:
    """Copy rows of all state tensors from ``source`` to rows of ``target``, in the given order.

    Args:
        target: Tensors of the same layers, with any number of rows. May be ``source``: all rows are
            read before the first is written.
    """
    pairs = [pair for both in zip(source, target, strict=True) for pair in zip(*both, strict=True)]
    # A copy of one row needs no index tensors on the device.
    if len(source_rows) == 1:
        for source_tensor, target_tensor in pairs:
            target_tensor[target_rows[0]].copy_(source_tensor[source_rows[0]])
    elif source_rows and pairs:
        rows = torch.tensor([source_rows, target_rows], device=pairs[0][0].device)
        for source_tensor, target_tensor in pairs:
            target_tensor.index_copy_(0, rows[1], source_tensor.index_select(0, rows[0]))


_ALIGNED_BYTES = 64


class CacheContents:
    """The tensors of KV-cache pages and recurrent-state rows, by page or row number.

    Attributes:
        states: State tensors of each layer that keeps a recurrent state.
    """

    def __init__(self, pools: Sequence[Sequence[tuple[Tensor, int]]], states: States = ()) -> None:
        """Keep references to existing caches.

        Args:
            pools: For each page pool, the cache tensors of the layers, each with the page axis.
            states: State tensors of each recurrent layer.
        """
        self._pools = pools
        self.states = states

    def page(self, pool_index: int, page: int) -> list[Tensor]:
        """Return one page of a pool, as a list of one tensor per layer."""
        return [cache.select(axis, page) for cache, axis in self._pools[pool_index]]

    def copy_page(self, pool_index: int, source: int, target: int) -> None:
        """Copy the page ``source`` of a pool to the page ``target``, in all layers."""
        for cache, axis in self._pools[pool_index]:
            cache.select(axis, target).copy_(cache.select(axis, source))

    def page_bytes(self, pool_index: int) -> int:
        """Return the size of one page of a pool over all layers, packed by ``pack``, in bytes."""
        return _packed_bytes([cache.select(axis, 0) for cache, axis in self._pools[pool_index]])


def state_row(states: States, row: int) -> list[Tensor]:
    """Return one row of every recurrent-state tensor."""
    return [part[row] for layer in states for part in layer]


def row_bytes(states: States) -> int:
    """Return the size of one state row over all layers, packed by ``pack``, in bytes."""
    return _packed_bytes([part[0] for layer in states for part in layer])


def pack(parts: Sequence[Tensor], memory: Tensor, queued: bool = False) -> None:
    """Copy tensors into the byte buffer ``memory``, each one aligned to 64 bytes.

    Args:
        memory: One-dimensional uint8 tensor on any device.
        queued: Do not wait for the copy. Safe only if the device itself orders later reads after
            it.
    """
    for part, target in zip(parts, _aligned_views(parts, memory), strict=True):
        target.copy_(part, non_blocking=queued)


def unpack(memory: Tensor, parts: Sequence[Tensor], queued: bool = False) -> None:
    """Copy tensors of the same shapes and dtypes back from the buffer that ``pack`` filled."""
    for part, stored in zip(parts, _aligned_views(parts, memory), strict=True):
        part.copy_(stored, non_blocking=queued)


def _packed_bytes(parts: Sequence[Tensor]) -> int:
    return sum(-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts)


def _aligned_views(parts: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Return views of ``memory`` with the dtypes and shapes of ``parts``."""
    views, start = [], 0
    for part in parts:
        view = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
        views.append(view)
        # A view with another dtype needs an aligned start.
        start += -(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return views


class StateCheckpoints:
    """Copies of recurrent states at page ends, by the key of the page.

    When all rows are in use, the least recently used checkpoint is evicted.

    Attributes:
        on_evict: Called with the key and the row before another checkpoint overwrites the row.
        rows: State tensors of the checkpoints.
    """

    def __init__(self, states: States, rows: States, num_rows: int) -> None:
        """Create an empty set of checkpoints.

        Args:
            states: State tensors of the running sequences.
            rows: State tensors of the same layers, with ``num_rows`` rows, at least one.
        """
        self.on_evict: Callable[[bytes, int], None] = _ignore
        self.rows = rows
        self._states = states
        self._row_by_key: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(num_rows)]

    def __len__(self) -> int:
        """Return the number of state checkpoints."""
        return len(self._row_by_key)

    def has_key(self, key: bytes) -> bool:
        """Return whether there is a state checkpoint for ``key``."""
        return key in self._row_by_key

    def save(self, key: bytes, slot: int) -> None:
        """Copy a sequence's recurrent state to a new checkpoint, unless ``key`` has one."""
        if key in self._row_by_key:
            self._row_by_key.move_to_end(key)
            return
        if not self._free:
            oldest, row = self._row_by_key.popitem(last=False)
            self.on_evict(oldest, row)
            self._free.append(row)
        row = self._row_by_key[key] = self._free.pop()
        copy_rows(self._states, [slot], self.rows, [row])

    def restore(self, key: bytes, slot: int) -> None:
        """Copy the checkpoint of ``key`` to a sequence's recurrent state."""
        self._row_by_key.move_to_end(key)
        copy_rows(self.rows, [self._row_by_key[key]], self._states, [slot])

    def forget(self) -> None:
        """Drop all state checkpoints."""
        self._free += self._row_by_key.values()
        self._row_by_key.clear()


def _ignore(key: bytes, row: int) -> None: ...
