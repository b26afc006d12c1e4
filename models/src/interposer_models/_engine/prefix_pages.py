"""Pages that sequences with equal beginnings share, kept after the last of them has ended."""

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
    """A pool whose pages can be known by the tokens up to their end.

    A page that nobody holds stays known until its room is wanted; of these the one that was held
    longest ago goes first, and of one sequence the last page. Nobody writes to a page that is
    known: it is whole, or nobody holds it.

    Attributes:
        on_evict: told the key and the page before other tokens take its room.
        num_evicted: pages whose content was given up for other tokens.
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
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Return how many pages nobody holds, known or not."""
        return super().num_free + len(self._idle)

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Do what ``PagePool`` does; pages that are known and idle are the last to be taken."""
        wanted = self.pages_for(num_tokens) - len(pages)
        if wanted > self.num_free:
            return False
        while wanted > super().num_free:
            page, _ = self._idle.popitem(last=False)
            key = self._forget(page)
            self.num_evicted += 1
            self.on_evict(key, page)
            heapq.heappush(self._free, page)
        held = len(pages)
        done = super().extend(pages, num_tokens)
        self._holders.update(pages[held:])
        return done

    def knows(self, key: bytes) -> bool:
        """Say whether a page is known by a key."""
        return key in self._pages

    def hold(self, key: bytes) -> int:
        """Return the page that is known by a key, with one holder more."""
        page = self._pages[key]
        self._idle.pop(page, None)
        self._holders[page] += 1
        return page

    def know(self, key: bytes, page: int) -> None:
        """Know a page that somebody holds by a key.

        Two that computed the same at once both have a page for it; one is enough.
        """
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def forget(self) -> None:
        """Know no page any more, as after other weights."""
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

    def _forget(self, page: int) -> bytes:
        key = self._keys.pop(page)
        del self._pages[key]
        return key


def page_keys(sequence: Sequence, count: int, page_size: int) -> list[bytes]:
    """Return the keys of a sequence: that of its beginning, then of ``count`` pages at least.

    The key of a page is the digest of all tokens up to its end, of the adapter and of the salt.
    """
    keys = sequence.page_keys
    if not keys:
        keys.append(_digest(repr((sequence.adapter, sequence.params.cache_salt)).encode()))
    while len(keys) <= count:
        start = (len(keys) - 1) * page_size
        keys.append(page_key(keys[-1], sequence.tokens(start, start + page_size)))
    return keys


def page_key(before: bytes, tokens: list[int]) -> bytes:
    """Return the key of a page with these tokens, behind one with the key ``before``."""
    return _digest(before + array("q", tokens).tobytes())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def check_shared_prefixes(has_prefixes: bool, has_sources: bool) -> None:
    """Raise ConfigError if a beginning cannot be taken up from what is kept of it."""
    reason = ""
    if has_prefixes:
        reason = "lets tokens of a prompt see later ones, so that no other prompt has their keys"
    elif has_sources:
        reason = "attends to a source, on which the keys and values of equal beginnings depend"
    if reason:
        raise ConfigError(f"prefix_cache=True, but the model {reason}. Try: leave it out")


def common_tokens(first: Items[int], second: Items[int]) -> int:
    """Return how many first tokens are equal."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _ignore(key: bytes, page: int) -> None:
    """Let a page go."""
