"""Pages that sequences with equal beginnings share, kept after the last of them has ended."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b

from interposer.errors import ConfigError
from interposer_models._engine.pages import PagePool
from interposer_models._engine.sequence import Sequence


@dataclass(slots=True)
class PrefixStatistics:
    """Counts of the prompts that were looked up; the text is for people.

    Attributes:
        tokens: of the sequences that began, those that began again among them.
        shared_tokens: that were in the cache already.
        evicted_pages: whose content was given up for other tokens.
    """

    tokens: int = 0
    shared_tokens: int = 0
    evicted_pages: int = 0

    def __str__(self) -> str:
        share = self.shared_tokens / self.tokens if self.tokens else 0.0
        return (
            f"{self.shared_tokens} of {self.tokens} prompt tokens were in the cache ({share:.1%}), "
            f"{self.evicted_pages} pages were given up"
        )


class PrefixPool(PagePool):
    """A pool whose whole pages are known by the tokens up to their end.

    A page that nobody holds stays known until its room is wanted; of these the one that was held
    longest ago goes first, and of one sequence the last page. Nobody writes to a page that is
    known: it is whole, so that what follows lies in another one.

    Attributes:
        statistics: since the pool was made.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.statistics = PrefixStatistics()
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
            self._forget(page)
            heapq.heappush(self._free, page)
            self.statistics.evicted_pages += 1
        held = len(pages)
        done = super().extend(pages, num_tokens)
        self._holders.update(pages[held:])
        return done

    def release(self, pages: list[int]) -> None:
        """Take back all of ``pages`` and empty the list."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._keys:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)
        pages.clear()

    def join(self, sequence: Sequence) -> None:
        """Give a sequence without pages those that hold its first tokens, but for the last one.

        The last token is computed in any case, as its logits are wanted.
        """
        pages, wanted = sequence.pages[0], len(sequence) - 1
        for number in range(wanted // self.page_size):
            page = self._pages.get(self._key(sequence, number))
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            pages.append(page)
        sequence.num_computed = sequence.num_shared = len(pages) * self.page_size
        self.statistics.tokens += len(sequence)
        self.statistics.shared_tokens += sequence.num_computed

    def learn(self, sequence: Sequence, first: int) -> None:
        """Know the whole pages of a sequence by their tokens, from its token ``first`` on."""
        pages = sequence.pages[0]
        for number in range(first // self.page_size, sequence.num_computed // self.page_size):
            key = self._key(sequence, number)
            # Two that computed the same at once both have a page for it; one is enough.
            if key not in self._pages and pages[number] not in self._keys:
                self._pages[key], self._keys[pages[number]] = pages[number], key

    def forget(self) -> None:
        """Know no page any more, as after other weights."""
        for page in [*self._keys]:
            self._forget(page)
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]

    def _key(self, sequence: Sequence, number: int) -> bytes:
        """Return the digest of all tokens up to the end of page ``number``, and of the adapter."""
        keys = sequence.page_keys
        while len(keys) <= number:
            start = len(keys) * self.page_size
            tokens = sequence.tokens(start, start + self.page_size)
            before = keys[-1] if keys else repr(sequence.adapter).encode()
            keys.append(blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest())
        return keys[number]


def check_shared_prefixes(
    pools: Items[PagePool], has_states: bool, has_prefixes: bool, has_sources: bool
) -> None:
    """Raise ConfigError if a beginning cannot be taken up from its pages."""
    reason = ""
    if has_states:
        reason = "keeps a state of each sequence, which pages do not hold"
    elif has_prefixes:
        reason = "lets tokens of a prompt see later ones, so that no other prompt has their keys"
    elif has_sources:
        reason = "attends to a source, on which the keys and values of equal beginnings depend"
    elif len(pools) > 1 or pools[0].seen_tokens is not None:
        reason = "has layers with windows, whose pages are given back while a sequence runs"
    if reason:
        raise ConfigError(f"prefix_cache=True, but the model {reason}. Try: leave it out")
