"""Page pool with a prefix cache: sequences share pages, which stay cached afterwards."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from hashlib import blake2b

from interposer.errors import ConfigError
from interposer_models._engine.pages import PagePool
from interposer_models._engine.sequence import Sequence


class PrefixPool(PagePool):
    """A page pool that registers pages under a key of all tokens up to the page end.

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
        self.on_evict: Callable[[bytes, int], None] = _ignore
        self.num_evicted = 0
        self._holders: Counter[int] = Counter()
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Registered pages without a holder, the one released longest ago first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages without a holder, cached ones included."""
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
        """Add a holder to the page that is registered under ``key``, and return the page."""
        page = self._pages[key]
        self._idle.pop(page, None)
        self._holders[page] += 1
        return page

    def register(self, key: bytes, page: int) -> None:
        """Register a page that a sequence holds under ``key``.

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


def page_keys(sequence: Sequence, count: int, page_size: int) -> list[bytes]:
    """Return the key of the empty prefix, then the keys of at least ``count`` pages.

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
    """Return the key of a page with ``tokens`` after the page with the key ``before``."""
    return _digest(before + array("q", tokens).tobytes())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def check_shared_prefixes(is_prefix_lm: bool, has_encoder_input: bool) -> None:
    """Raise ConfigError if sequences with equal prefixes cannot share cached keys and values."""
    reason = ""
    if is_prefix_lm:
        reason = "lets prompt tokens attend to later ones, so that no other prompt has their keys"
    elif has_encoder_input:
        reason = "has an encoder, and keys and values of equal prefixes depend on its input"
    if reason:
        raise ConfigError(f"prefix_cache=True, but the model {reason}. Try: leave it out")


def common_tokens(first: Items[int], second: Items[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    count = 0
    for first_token, second_token in zip(first, second, strict=False):
        if first_token != second_token:
            break
        count += 1
    return count


def _ignore(key: bytes, page: int) -> None: ...
