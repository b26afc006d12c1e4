"""The search for what is kept of the first tokens of a sequence.

Dimensions: S page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from interposer_models._engine.prefix_pages import PrefixPool, common_tokens, page_keys
from interposer_models._engine.prefix_store import PrefixStore
from interposer_models._engine.prefix_tails import PrefixTails
from interposer_models._engine.sequence import Sequence
from interposer_models._engine.state_checkpoints import StateCheckpoints


@dataclass(frozen=True, slots=True)
class Tail:
    """A page of which only the first tokens are wanted.

    Attributes:
        key: by which it is known; empty where a running sequence fills it.
        pages: of that sequence, one of each pool.
    """

    num_tokens: int
    key: bytes = b""
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of a beginning that are there.

    Attributes:
        count: whole pages to begin with.
        tail: the page behind these.
        known: whole pages of which all layers have the keys, though there may be no state.
        num_tokens: in the pages and the tail.
    """

    count: int
    tail: Tail | None
    known: int
    num_tokens: int


class PrefixSearch:
    """Finds the longest beginning of which all layers have what the next token sees.

    Attributes:
        tails: the pages that are known, by what lies before them.
    """

    def __init__(
        self,
        pools: Items[PrefixPool],
        checkpoints: StateCheckpoints | None,
        store: PrefixStore | None,
    ) -> None:
        self.tails = PrefixTails()
        self._pools = pools
        self._size = pools[0].page_size
        self._checkpoints = checkpoints
        self._store = store

    def longest(
        self, sequence: Sequence, running: Items[Sequence], needs_pages: bool = True
    ) -> Match:
        """Return the longest beginning of which everything is there.

        Args:
            needs_pages: it may be stored, or end within a page.
        """
        size, pools = self._size, self._pools
        count = known = complete = 0
        # How many pages in a row, up to the present one, each pool has.
        runs = [0] * len(pools)
        for number in range(1, (len(sequence) - 1) // size + 1):
            key = page_keys(sequence, number, size)[number]
            for place in range(len(pools)):
                runs[place] = runs[place] + 1 if self._has(place, key, needs_pages) else 0
            if any(p.seen_tokens is None and r < number for p, r in zip(pools, runs, strict=True)):
                break
            if all(runs):
                known = number
            seen = (number - pool.num_unseen(number * size) for pool in pools)
            if all(run >= each for run, each in zip(runs, seen, strict=True)):
                complete = number
                if self._checkpoints is None or self._has_state(key, needs_pages):
                    count = number
        tail = self._tail(sequence, complete, running) if needs_pages else None
        if tail is None:
            return Match(count, None, known, count * size)
        return Match(complete, tail, known, complete * size + tail.num_tokens)

    def _tail(self, sequence: Sequence, count: int, running: Items[Sequence]) -> Tail | None:
        """Return the page behind ``count`` whole ones that agrees farthest, if one does at all."""
        start = count * self._size
        wanted = sequence.tokens(start, min(start + self._size, len(sequence) - 1))
        if not wanted:
            return None
        before = page_keys(sequence, count, self._size)[count]
        found: list[Tail] = []
        if self._checkpoints is None:
            for tokens, pages in self._filling(before, count, running):
                found.append(Tail(common_tokens(wanted, tokens), b"", pages))
        for key, tokens in self.tails.after(before, wanted):
            agreeing = common_tokens(wanted, tokens)
            if self._checkpoints is not None and not (
                agreeing == len(tokens) and self._has_state(key, True)
            ):
                continue
            if all(self._has(place, key, True) for place in range(len(self._pools))):
                found.append(Tail(agreeing, key))
        longest = max(found, key=lambda tail: tail.num_tokens, default=None)
        return longest if longest is not None and longest.num_tokens else None

    def _filling(
        self, before: bytes, count: int, running: Items[Sequence]
    ) -> Iterator[tuple[list[int], tuple[int, ...]]]:
        """Yield the tokens and pages of running sequences behind a page with the key ``before``."""
        start = count * self._size
        for other in running:
            if other.num_computed > start and other.page_keys[count : count + 1] == [before]:
                pages = tuple(pages[count] for pages in other.pages)
                if all(p != pool.zero_page for p, pool in zip(pages, self._pools, strict=True)):
                    stop = min(start + self._size, other.num_computed)
                    yield other.tokens(start, stop), pages

    def _has(self, place: int, key: bytes, stored: bool) -> bool:
        if self._pools[place].knows(key):
            return True
        return stored and self._store is not None and self._store.kinds[place].knows(key)

    def _has_state(self, key: bytes, stored: bool) -> bool:
        assert self._checkpoints is not None
        if self._checkpoints.knows(key):
            return True
        return stored and self._store is not None and self._store.kinds[-1].knows(key)


def agreeing_tokens(sequence: Sequence, other: Sequence, size: int) -> int:
    """Return how many first tokens, but for the last one, a sequence shares with another.

    Args:
        size: of pages.
    """
    low, high = 0, min(len(sequence) - 1, len(other)) // size
    own, others = page_keys(sequence, high, size), page_keys(other, high, size)
    if own[0] != others[0]:
        return 0
    while low < high:  # keys agree up to a page and differ behind it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if own[middle] == others[middle] else (low, middle - 1)
    start, stop = low * size, min((low + 1) * size, len(sequence) - 1)
    return start + common_tokens(sequence.tokens(start, stop), other.tokens(start, stop))
