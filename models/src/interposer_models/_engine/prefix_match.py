"""Search for the cached prefix of a sequence.

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
    """A partly matching page after the whole pages of a prefix; the matching tokens can be copied.

    Attributes:
        num_tokens: Number of matching tokens.
        key: Key of the page; empty while a running sequence fills the page.
        pages: The page in each pool, while a running sequence fills the page.
    """

    num_tokens: int
    key: bytes = b""
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence.

    Attributes:
        num_pages: Number of whole pages to share.
        tail: The partly matching page after the whole pages; None if there is none.
        num_known_pages: Number of whole pages with cached keys and values, even without a state
            checkpoint.
        num_tokens: Number of tokens in the pages and the tail.
    """

    num_pages: int
    tail: Tail | None
    num_known_pages: int
    num_tokens: int


class PrefixSearch:
    """Finds the longest prefix for which every layer has all that the next token attends to.

    Attributes:
        tails: Registered pages by the page before them.
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
        """Return the longest cached prefix of a sequence.

        Args:
            running: Running sequences; unfinished pages of these can match too.
            needs_pages: Whether the match may need free pages: for a partial page, or to restore
                offloaded pages.
        """
        size, pools = self._size, self._pools
        count = num_known_pages = num_complete = 0
        # For each pool: the number of consecutive cached pages up to the present one.
        num_cached = [0] * len(pools)
        for number in range(1, (len(sequence) - 1) // size + 1):
            key = page_keys(sequence, number, size)[number]
            for pool_index in range(len(pools)):
                num_cached[pool_index] = (
                    num_cached[pool_index] + 1 if self._has(pool_index, key, needs_pages) else 0
                )
            if any(
                pool.seen_tokens is None and num_pool_pages < number
                for pool, num_pool_pages in zip(pools, num_cached, strict=True)
            ):
                break
            if all(num_cached):
                num_known_pages = number
            num_attended = (number - pool.num_unseen_pages(number * size) for pool in pools)
            if all(
                available >= required
                for available, required in zip(num_cached, num_attended, strict=True)
            ):
                num_complete = number
                # Recurrent layers can only continue from a checkpoint at the page end.
                if self._checkpoints is None or self._has_state(key, needs_pages):
                    count = number
        tail = self._tail(sequence, num_complete, running) if needs_pages else None
        if tail is None:
            return Match(count, None, num_known_pages, count * size)
        return Match(num_complete, tail, num_known_pages, num_complete * size + tail.num_tokens)

    def _tail(self, sequence: Sequence, count: int, running: Items[Sequence]) -> Tail | None:
        """Return the longest partial match after ``count`` whole pages; None without one."""
        start = count * self._size
        next_tokens = sequence.tokens(start, min(start + self._size, len(sequence) - 1))
        if not next_tokens:
            return None
        key_before = page_keys(sequence, count, self._size)[count]
        tails: list[Tail] = []
        # A running sequence's state is ahead of its page, so only models without states can copy
        # it.
        if self._checkpoints is None:
            for tokens, pages in self._running_tails(key_before, count, running):
                tails.append(Tail(common_tokens(next_tokens, tokens), b"", pages))
        for key, tokens in self.tails.after(key_before, next_tokens):
            num_common = common_tokens(next_tokens, tokens)
            # A recurrent state is only valid at the exact end of the tail.
            if self._checkpoints is not None and not (
                num_common == len(tokens) and self._has_state(key, True)
            ):
                continue
            if all(self._has(pool_index, key, True) for pool_index in range(len(self._pools))):
                tails.append(Tail(num_common, key))
        longest = max(tails, key=lambda tail: tail.num_tokens, default=None)
        return longest if longest is not None and longest.num_tokens else None

    def _running_tails(
        self, key_before: bytes, count: int, running: Items[Sequence]
    ) -> Iterator[tuple[list[int], tuple[int, ...]]]:
        """Yield tokens and unfinished pages of running sequences after the key ``key_before``."""
        start = count * self._size
        for other in running:
            if other.num_computed > start and other.page_keys[count : count + 1] == [key_before]:
                pages = tuple(pages[count] for pages in other.pages)
                if all(p != pool.zero_page for p, pool in zip(pages, self._pools, strict=True)):
                    stop = min(start + self._size, other.num_computed)
                    yield other.tokens(start, stop), pages

    def _has(self, pool_index: int, key: bytes, may_restore: bool) -> bool:
        if self._pools[pool_index].has_key(key):
            return True
        return (
            may_restore and self._store is not None and self._store.kinds[pool_index].has_key(key)
        )

    def _has_state(self, key: bytes, may_restore: bool) -> bool:
        assert self._checkpoints is not None
        if self._checkpoints.has_key(key):
            return True
        return may_restore and self._store is not None and self._store.kinds[-1].has_key(key)


def common_prefix_length(sequence: Sequence, other: Sequence, size: int) -> int:
    """Return the length of the common prefix of two sequences, at most all but the last token.

    Args:
        size: Page size.
    """
    low, high = 0, min(len(sequence) - 1, len(other)) // size
    keys, other_keys = page_keys(sequence, high, size), page_keys(other, high, size)
    if keys[0] != other_keys[0]:
        return 0
    # Binary search: the keys are equal up to some page and differ after it.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keys[middle] == other_keys[middle] else (low, middle - 1)
    start, stop = low * size, min((low + 1) * size, len(sequence) - 1)
    return start + common_tokens(sequence.tokens(start, stop), other.tokens(start, stop))
