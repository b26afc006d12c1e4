"""Storage of the prefix cache: pages registered by key, and rows evicted to other memory.

``PrefixPool`` keeps the pages of ended sequences until the memory is needed. ``PrefixStore`` holds
evicted pages and state checkpoints in host memory or in a file.
"""

from __future__ import annotations

import heapq
import mmap
import os
import tempfile
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from interposer import Platform
from interposer.errors import ConfigError
from interposer_engine._pages import PagePool, pack, unpack
from interposer_engine._sequence import TokenSequence
from interposer_ops.devices.host_memory import empty

_ALIGNED_BYTES = 64


class StoredRows:
    """Fixed-size byte rows by key, of which the least recently used is evicted first.

    Attributes:
        on_evict: Called with the key of an evicted row.
    """

    def __init__(self, memory: Tensor, row_bytes: int) -> None:
        """Divide ``memory``, a tensor of bytes, into as many empty rows as fit."""
        self.on_evict: Callable[[bytes], None] = _ignore_row
        self._memory = memory[: len(memory) // row_bytes * row_bytes].view(-1, row_bytes)
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(len(self._memory))]

    def __len__(self) -> int:
        """Return the number of rows in use."""
        return len(self._rows)

    def has_key(self, key: bytes) -> bool:
        """Return whether a row is stored under ``key``."""
        return key in self._rows

    def row(self, key: bytes) -> Tensor:
        """Return the bytes stored under ``key``, and mark the row as recently used."""
        self._rows.move_to_end(key)
        return self._memory[self._rows[key]]

    def new_row(self, key: bytes, protected: Set[bytes]) -> Tensor | None:
        """Return an empty or evicted row to write under a new key; None if all are protected.

        Args:
            protected: Keys that must not be evicted now.
        """
        if not self._free:
            oldest = next(
                (stored_key for stored_key in self._rows if stored_key not in protected), None
            )
            if oldest is None:
                return None
            self._free.append(self._rows.pop(oldest))
            self.on_evict(oldest)
        row = self._rows[key] = self._free.pop()
        return self._memory[row]

    def forget(self) -> None:
        """Empty all rows."""
        self._free += self._rows.values()
        self._rows.clear()


class PrefixStore:
    """Store of offloaded cache pages and state checkpoints."""

    def __init__(self, memory: Tensor, kinds: Sequence[tuple[int, int]], queued: bool) -> None:
        """Divide the memory among pages and state checkpoints, in proportion to their sizes.

        Args:
            memory: Bytes to divide.
            kinds: Row size in bytes and number of rows in the KV cache, for each kind.
            queued: Whether the device itself copies to and from the memory, so that nothing waits.
        Raises: ConfigError: the share of a kind is smaller than one row.
        """
        self.queued = queued
        sizes = [(max(row_bytes, _ALIGNED_BYTES), count) for row_bytes, count in kinds]
        total = sum(row_bytes * count for row_bytes, count in sizes)
        self.kinds: list[StoredRows] = []
        start = 0
        for row_bytes, count in sizes:
            kind_bytes = len(memory) * row_bytes * count // total // _ALIGNED_BYTES * _ALIGNED_BYTES
            # The advice is a size with which each kind gets at least one row.
            if kind_bytes < row_bytes:
                needed = max(-(-total // count) for _, count in sizes) + len(sizes) * _ALIGNED_BYTES
                raise ConfigError(
                    f"offload_bytes is {len(memory)}, which holds no page of each kind. "
                    f"Try: {needed} at least"
                )
            self.kinds.append(StoredRows(memory[start : start + kind_bytes], row_bytes))
            start += kind_bytes

    def put(self, kind: int, key: bytes, parts: Sequence[Tensor], protected: Set[bytes]) -> bool:
        """Store tensors under ``key``; return False if no unprotected row is left."""
        rows = self.kinds[kind]
        if rows.has_key(key):
            rows.row(key)
        elif (row := rows.new_row(key, protected)) is not None:
            pack(parts, row, self.queued)
        else:
            return False
        return True

    def get(self, kind: int, key: bytes, parts: Sequence[Tensor]) -> None:
        """Copy the tensors stored under ``key`` to the tensors ``parts``."""
        unpack(self.kinds[kind].row(key), parts, self.queued)

    def forget(self) -> None:
        """Empty the store of pages and of state checkpoints."""
        for rows in self.kinds:
            rows.forget()


def file_memory(num_bytes: int, folder: Path) -> Tensor:
    """Map an unnamed temporary file in ``folder`` as a tensor that owns the file.

    The disk space is allocated at once, because a write to a mapped file on a full disk would end
    the process.

    Raises: ConfigError: the folder does not exist, or has too little space.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise ConfigError(
            f"offload_dir {folder} cannot take {num_bytes} bytes: {error.strerror}. "
            "Try: a smaller offload_bytes, or another folder"
        ) from None


def host_memory(num_bytes: int, platform: Platform) -> Tensor:
    """Allocate host memory, pinned if the platform supports direct access by the device."""
    memory = empty((num_bytes,), torch.uint8)
    return platform.pin_memory(memory) if platform.provides("pin_memory") else memory


def _reserve(file: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:  # macOS has no posix_fallocate
        os.ftruncate(file, num_bytes)


def _ignore_row(key: bytes) -> None: ...


class PrefixPool(PagePool):
    """A page pool that finds pages by a key of all tokens up to the page's end.

    A registered page without a holder stays cached until the memory is needed. Then the page that
    was released longest ago is evicted first; of one sequence, the last page. No sequence writes to
    a registered page: a registered page is full, or has no holder.

    Attributes:
        on_evict: Called with the key and the page before other tokens overwrite the page.
        num_evicted: Number of evicted pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int = 0, seen_tokens: int | None = None
    ) -> None:
        super().__init__(num_pages, page_size, num_slots, seen_tokens)
        self.on_evict: Callable[[bytes, int], None] = _ignore_page
        self.num_evicted = 0
        self._holders: Counter[int] = Counter()
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Registered pages without a holder, the one released longest ago first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds, including cached pages."""
        return super().num_free + len(self._idle)

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow ``pages`` as ``PagePool`` does; evict cached pages only if no other page is free."""
        num_missing = self.pages_for(num_tokens) - len(pages)
        if num_missing > self.num_free:
            return False
        # ``_idle`` is in order of release: the first page was released longest ago.
        while num_missing > super().num_free:
            page, _ = self._idle.popitem(last=False)
            key = self._unregister(page)
            self.num_evicted += 1
            self.on_evict(key, page)
            heapq.heappush(self._free, page)
        num_old = len(pages)
        is_extended = super().extend(pages, num_tokens)
        self._holders.update(pages[num_old:])
        return is_extended

    def has_key(self, key: bytes) -> bool:
        """Return whether a page is registered under ``key``."""
        return key in self._pages

    def acquire(self, key: bytes) -> int:
        """Count another sequence that holds the page of ``key``, and return the page."""
        page = self._pages[key]
        self._idle.pop(page, None)
        self._holders[page] += 1
        return page

    def register(self, key: bytes, page: int) -> None:
        """Register a page that a sequence holds under ``key``, so that later sequences find it.

        If two sequences computed the same tokens at the same time, the first page is registered.
        """
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def forget(self) -> None:
        """Unregister all pages, for example because the weights have changed."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()
        self._pages.clear()
        self._keys.clear()

    def _take_back(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        del self._holders[page]
        if page in self._keys:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def _unregister(self, page: int) -> bytes:
        key = self._keys.pop(page)
        del self._pages[key]
        return key


def page_keys(sequence: TokenSequence, count: int, page_size: int) -> list[bytes]:
    """Return the key of the empty prefix, then the keys of at least the first ``count`` pages.

    A page key is the digest of all tokens up to the end of the page, of the adapter and of the
    salt.
    """
    keys = sequence.page_keys
    if not keys:
        keys.append(_digest(repr((sequence.adapter, sequence.params.cache_salt)).encode()))
    while len(keys) <= count:
        start = (len(keys) - 1) * page_size
        keys.append(page_key(keys[-1], sequence.tokens(start, start + page_size)))
    return keys


def page_key(before: bytes, tokens: list[int]) -> bytes:
    """Return the key of a page that holds ``tokens``, after the page with the key ``before``."""
    return _digest(before + array("q", tokens).tobytes())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def check_shared_prefixes(is_prefix_lm: bool, has_encoder_input: bool) -> None:
    """Raise ConfigError if the model's keys and values cannot be shared by equal prefixes."""
    reason = ""
    if is_prefix_lm:
        reason = "lets prompt tokens attend to later ones, so no other prompt has their keys"
    elif has_encoder_input:
        reason = "has an encoder, and keys and values of equal prefixes depend on its input"
    if reason:
        raise ConfigError(f"prefix_cache=True, but the model {reason}. Try: leave it out")


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    count = 0
    for first_token, second_token in zip(first, second, strict=False):
        if first_token != second_token:
            break
        count += 1
    return count


def _ignore_page(key: bytes, page: int) -> None: ...


@dataclass(slots=True)
class PrefixStatistics:
    """Counts of cached prompt tokens and pages; ``str`` describes the counts for people.

    Attributes:
        tokens: Tokens of all started sequences; a sequence that starts again counts again.
        shared_tokens: Number of prompt tokens that were cached.
        evicted_pages: Pages that were evicted for other tokens.
        stored_pages: Number of evicted pages that were offloaded to other memory.
        restored_pages: Pages that were restored from other memory.
    """

    tokens: int = 0
    shared_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    restored_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that were cached; 0 before the first sequence."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.shared_tokens} of {self.tokens} prompt tokens were in the cache "
            f"({self.hit_rate:.1%}), {self.evicted_pages} pages were evicted"
        )
        if self.stored_pages:
            text += (
                f", of which {self.stored_pages} were stored and {self.restored_pages} came back"
            )
        return text
