"""Prefix cache: sequences with equal prefixes share KV-cache pages and copies of states.

``PrefixSearch`` finds the longest cached prefix of a sequence; ``SharedPrefixes`` gives the pages
and states to the sequence, and registers new ones.

Dimensions: S page size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import itemgetter

from interposer_engine._pages import CacheContents, StateCheckpoints, state_row
from interposer_engine._prefix_pool import (
    PrefixPool,
    PrefixStatistics,
    PrefixStore,
    common_tokens,
    page_key,
    page_keys,
)
from interposer_engine._sequence import TokenSequence

# A sequence waits for another one to compute a shared prefix only if it gains this many tokens.
_WORTH_TOKENS = 16
# A checkpoint splits a prompt into two steps; below this many tokens, recomputing is faster.
_LEAST_TOKENS = 64


class SharedPrefixes:
    """The engine's prefix cache, which gives a new sequence the pages and states of its prefix.

    Whole pages are shared. The page after the whole pages is copied as far as the tokens match.
    Layers with windows need the pages that the next token attends to; recurrent layers need a
    checkpoint after exactly the matching tokens.

    Attributes:
        statistics: Counts since the cache was created.
    """

    def __init__(
        self,
        pools: Sequence[PrefixPool],
        contents: CacheContents,
        checkpoints: StateCheckpoints | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Create an empty prefix cache.

        Args:
            contents: Tensors of the pages of the pools, and of the state rows.
            checkpoints: State checkpoints; None for a model without recurrent states.
            store: Memory for evicted pages and checkpoints, with one kind of rows per pool and then
                one for checkpoints; None to drop evicted ones.
        """
        self.statistics = PrefixStatistics()
        self._pools = pools
        self._size = pools[0].page_size
        self._contents = contents
        self._checkpoints = checkpoints
        self._store = store
        self._search = PrefixSearch(pools, checkpoints, store)
        self._protected: frozenset[bytes] = frozenset()
        # For each waiting sequence: the sequence it waits for, and the number of tokens to await.
        self._awaited: dict[TokenSequence, tuple[TokenSequence, int]] = {}
        for pool_index, pool in enumerate(pools):
            pool.on_evict = partial(self._offload_page, pool_index)
        if store is not None:
            store.kinds[0].on_evict = self._drop_tail
            if checkpoints is not None:
                checkpoints.on_evict = self._store_state

    def plan_checkpoints(self, sequence: TokenSequence, running: Sequence[TokenSequence]) -> None:
        """Let running sequences save recurrent states where a new sequence diverges."""
        if self._checkpoints is None:
            return
        for older in takewhile(lambda candidate: candidate is not sequence, running):
            position = common_prefix_length(sequence, older, self._size) // self._size * self._size
            if position > older.num_computed and position not in older.checkpoint_positions:
                older.checkpoint_positions.append(position)

    def attach(self, sequence: TokenSequence, running: Sequence[TokenSequence]) -> bool:
        """Give a new sequence the longest cached prefix, leaving at least one token to compute.

        The last token is always computed, because the logits of the last token are needed.

        Args:
            running: All running sequences, the older ones first, including this one.
        Returns: False if the sequence must wait for an older sequence that is computing more of the
            prefix.
        """
        older_sequences = [*takewhile(lambda candidate: candidate is not sequence, running)]
        if sequence.num_missing_logprobs:
            # Prompt log probabilities need the logits of the prompt, which are not cached.
            page_keys(sequence, 0, self._size)
            self._begin(sequence, Match(0, None, 0, 0), running)
            return True
        awaited, end = self._awaited.pop(sequence, (sequence, 0))
        # Search again if the awaited sequence has ended, was preempted, or has computed the prefix.
        if awaited not in older_sequences or awaited.num_computed >= end:
            match = self._search.longest(sequence, running)
            shareable = (
                (self._future_prefix_length(sequence, older), older) for older in older_sequences
            )
            end, awaited = max(shareable, key=itemgetter(0), default=(0, sequence))
            if end - match.num_tokens < _WORTH_TOKENS:
                self._begin(sequence, match, running)
                return True
        self._awaited[sequence] = awaited, end
        return False

    def _begin(
        self, sequence: TokenSequence, match: Match, running: Sequence[TokenSequence]
    ) -> None:
        if not self._load_match(sequence, match):
            # Too few pages are free to copy or restore pages: share only cached whole pages.
            match = self._search.longest(sequence, running, needs_pages=False)
            self._load_match(sequence, match)
        sequence.num_computed = sequence.num_shared = match.num_tokens
        self.statistics.tokens += len(sequence)
        self.statistics.shared_tokens += sequence.num_computed
        if self._checkpoints is not None:
            sequence.state_tokens = sequence.num_computed
            sequence.checkpoint_positions += self._checkpoint_positions(
                sequence, match.num_known_pages
            )

    def limit_chunk(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Return ``num_tokens``, or fewer to stop at the next position of a state checkpoint."""
        num_computed = sequence.num_computed
        return min(
            [
                num_tokens,
                *(
                    position - num_computed
                    for position in sequence.checkpoint_positions
                    if position > num_computed
                ),
            ]
        )

    def register_computed(self, sequence: TokenSequence, first: int) -> None:
        """Register the pages that a sequence has filled from token ``first`` on."""
        if not sequence.page_keys:
            return
        size, stop = self._size, sequence.num_computed // self._size
        for number in range(first // size, stop):
            keys = page_keys(sequence, number + 1, size)
            tokens = sequence.tokens(number * size, (number + 1) * size)
            self._register(sequence, number, keys[number + 1], tokens)
        if self._checkpoints is not None and sequence.num_computed in sequence.checkpoint_positions:
            self._save_state(sequence, page_keys(sequence, stop, size)[stop])

    def detach(self, sequence: TokenSequence) -> None:
        """Register the last page and state of a sequence before its memory is freed."""
        self._awaited.pop(sequence, None)
        count, num_tail_tokens = divmod(sequence.num_computed, self._size)
        if not (sequence.page_keys and sequence.num_computed):
            return
        key = page_keys(sequence, count, self._size)[count]
        if num_tail_tokens:
            tokens = sequence.tokens(count * self._size, sequence.num_computed)
            key = page_key(key, tokens)
            self._register(sequence, count, key, tokens)
        if self._checkpoints is not None:
            self._save_state(sequence, key)

    def forget(self) -> None:
        """Empty the cache, for example because the weights have changed."""
        for part in (*self._pools, self._checkpoints, self._store):
            if part is not None:
                part.forget()
        self._search.tails.clear()

    def _future_prefix_length(self, sequence: TokenSequence, older: TokenSequence) -> int:
        """Return the length of the common prefix that ``older`` has yet to compute, or 0."""
        # A sequence that decodes computes no more of its prompt.
        if len(older) - older.num_computed <= 1:
            return 0
        end = common_prefix_length(sequence, older, self._size)
        if self._checkpoints is not None:
            end = max(
                (position for position in older.checkpoint_positions if position <= end), default=0
            )
        return end if end > older.num_computed else 0

    def _checkpoint_positions(self, sequence: TokenSequence, num_known_pages: int) -> set[int]:
        """Return the token counts after which to save a sequence's recurrent state.

        Positions are the end of the last whole page, the end of the known pages, and 64, 128, 256,
        ... tokens before the end of the sequence. So a sequence that shares all but the last n
        tokens computes at most about 2 n tokens.
        """
        size, max_shared = self._size, len(sequence) - 1
        positions, gap = {max_shared // size * size}, _LEAST_TOKENS
        while gap < max_shared:
            positions.add((max_shared - gap) // size * size)
            gap *= 2
        return {position for position in positions if position >= _LEAST_TOKENS} | {
            num_known_pages * size
        }

    def _load_match(self, sequence: TokenSequence, match: Match) -> bool:
        """Give a sequence the pages and state of a match; return False if pages are lacking."""
        num_tokens, tail = match.num_tokens, match.tail
        keys = sequence.page_keys[1 : match.num_pages + 1]
        # The checkpoint to restore has the key of the last matching page.
        key = tail.key if tail is not None else keys[-1] if keys else b""
        self._protected = frozenset((*keys, key))
        try:
            for pool_index in range(len(self._pools)):
                if not self._load_pages(
                    sequence.pages[pool_index], pool_index, keys, tail, num_tokens
                ):
                    for pool, pages in zip(self._pools, sequence.pages, strict=True):
                        pool.release(pages)
                    return False
        finally:
            self._protected = frozenset()
        if self._checkpoints is not None and num_tokens:
            if self._checkpoints.has_key(key):
                self._checkpoints.restore(key, sequence.state_slot)
            else:
                assert self._store is not None  # where it was found
                parts = state_row(self._contents.states, sequence.state_slot)
                self._store.get(len(self._pools), key, parts)
        return True

    def _load_pages(
        self,
        pages: list[int],
        pool_index: int,
        keys: list[bytes],
        tail: Tail | None,
        num_tokens: int,
    ) -> bool:
        pool, store, contents = self._pools[pool_index], self._store, self._contents
        num_unseen_pages = min(pool.num_unseen_pages(num_tokens), len(keys))
        seen_keys = keys[num_unseen_pages:]
        pages += [pool.acquire(key) if pool.has_key(key) else pool.zero_page for key in seen_keys]
        # Pages that the pool has evicted are restored from the store into new pages.
        missing = [number for number, page in enumerate(pages) if page == pool.zero_page]
        # Hold the page to copy, so that the allocation below does not evict it.
        copy_sources = (
            [pool.acquire(tail.key)] if tail is not None and pool.has_key(tail.key) else []
        )
        new_pages: list[int] = []
        has_pages = pool.extend(new_pages, (len(missing) + (tail is not None)) * self._size)
        if has_pages:
            for number in missing:
                page = pages[number] = new_pages.pop(0)
                assert store is not None  # where it was found
                store.get(pool_index, seen_keys[number], contents.page(pool_index, page))
                pool.register(seen_keys[number], page)
            self.statistics.restored_pages += len(missing)
            # Pages before the window need not be cached.
            pages[:0] = [pool.zero_page] * num_unseen_pages
            if tail is not None:
                pages += new_pages
                if copy_sources or tail.pages:
                    contents.copy_page(
                        pool_index, (copy_sources or [tail.pages[pool_index]])[0], new_pages[0]
                    )
                else:
                    assert store is not None
                    store.get(pool_index, tail.key, contents.page(pool_index, new_pages[0]))
                    self.statistics.restored_pages += 1
        pool.release(copy_sources)
        return has_pages

    def _register(
        self, sequence: TokenSequence, number: int, key: bytes, tokens: list[int]
    ) -> None:
        """Register a page of a sequence in each pool where the sequence still holds the page."""
        for pool, pages in zip(self._pools, sequence.pages, strict=True):
            # The page may have left the window of this pool already.
            if pages[number] != pool.zero_page:
                pool.register(key, pages[number])
        if self._pools[0].has_key(key):
            self._search.tails.add(sequence.page_keys[number], key, tokens)

    def _save_state(self, sequence: TokenSequence, key: bytes) -> None:
        assert self._checkpoints is not None
        # The state is not usable if it includes rejected draft tokens.
        if sequence.state_tokens == sequence.num_computed:
            self._checkpoints.save(key, sequence.state_slot)

    def _offload_page(self, pool_index: int, key: bytes, page: int) -> None:
        """Copy an evicted page to the store of offloaded pages, if there is one."""
        self.statistics.evicted_pages += 1
        parts = [] if self._store is None else self._contents.page(pool_index, page)
        if self._store is not None and self._store.put(pool_index, key, parts, self._protected):
            self.statistics.stored_pages += 1
        # Tails are indexed by pages of the first pool, the one with the widest window.
        elif pool_index == 0:
            self._search.tails.remove(key)

    def _store_state(self, key: bytes, row: int) -> None:
        assert self._store is not None
        assert self._checkpoints is not None
        self._store.put(
            len(self._pools), key, state_row(self._checkpoints.rows, row), self._protected
        )

    def _drop_tail(self, key: bytes) -> None:
        if not self._pools[0].has_key(key):
            self._search.tails.remove(key)


class PrefixTails:
    """Index of cached pages by the key of the preceding page and the page's first token."""

    def __init__(self) -> None:
        self._tails: dict[tuple[bytes, int], dict[bytes, list[int]]] = {}
        self._position_by_key: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        """Return the number of indexed pages."""
        return len(self._position_by_key)

    def add(self, before: bytes, key: bytes, tokens: list[int]) -> None:
        """Add a page that holds at least one token.

        Args:
            before: Key of the page before the page.
            key: Key of the page.
            tokens: Tokens of the page.
        """
        if key not in self._position_by_key:
            position = self._position_by_key[key] = before, tokens[0]
            self._tails.setdefault(position, {})[key] = tokens

    def remove(self, key: bytes) -> None:
        """Remove the page ``key`` from the index, if it is indexed."""
        if (position := self._position_by_key.pop(key, None)) is not None:
            del self._tails[position][key]
            if not self._tails[position]:
                del self._tails[position]

    def after(self, before: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield keys and tokens of pages after ``before`` that share the first of ``tokens``."""
        yield from self._tails.get((before, tokens[0]), {}).items()

    def clear(self) -> None:
        """Remove all pages from the index."""
        self._tails.clear()
        self._position_by_key.clear()


@dataclass(frozen=True, slots=True)
class Tail:
    """A page after a prefix's whole pages of which only the first tokens match.

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
    """The longest cached prefix that matches a sequence: its pages, and a partial page.

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
    """Finds the longest prefix whose keys, values and states are cached as far as needed.

    Attributes:
        tails: Registered pages by the page before them.
    """

    def __init__(
        self,
        pools: Sequence[PrefixPool],
        checkpoints: StateCheckpoints | None,
        store: PrefixStore | None,
    ) -> None:
        self.tails = PrefixTails()
        self._pools = pools
        self._size = pools[0].page_size
        self._checkpoints = checkpoints
        self._store = store

    def longest(
        self, sequence: TokenSequence, running: Sequence[TokenSequence], needs_pages: bool = True
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

    def _tail(
        self, sequence: TokenSequence, count: int, running: Sequence[TokenSequence]
    ) -> Tail | None:
        """Return the page with the longest partial match after ``count`` whole pages, or None."""
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
        self, key_before: bytes, count: int, running: Sequence[TokenSequence]
    ) -> Iterator[tuple[list[int], tuple[int, ...]]]:
        """Yield tokens and unfinished last pages of running sequences after ``key_before``."""
        start = count * self._size
        for sequence in running:
            if sequence.num_computed > start and sequence.page_keys[count : count + 1] == [
                key_before
            ]:
                pages = tuple(pages[count] for pages in sequence.pages)
                if all(p != pool.zero_page for p, pool in zip(pages, self._pools, strict=True)):
                    stop = min(start + self._size, sequence.num_computed)
                    yield sequence.tokens(start, stop), pages

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


def common_prefix_length(sequence: TokenSequence, cached: TokenSequence, size: int) -> int:
    """Return the length of the common prefix of two sequences, without the last token.

    Args:
        size: Page size.
    """
    low, high = 0, min(len(sequence) - 1, len(cached)) // size
    keys, cached_keys = page_keys(sequence, high, size), page_keys(cached, high, size)
    if keys[0] != cached_keys[0]:
        return 0
    # Binary search: the keys are equal up to some page and differ after it.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keys[middle] == cached_keys[middle] else (low, middle - 1)
    start, stop = low * size, min((low + 1) * size, len(sequence) - 1)
    return start + common_tokens(sequence.tokens(start, stop), cached.tokens(start, stop))
