"""Prefix cache: sequences with equal prefixes share pages, and copies of recurrent states.

Dimensions: S page size.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from itertools import takewhile
from operator import itemgetter

from interposer_models._engine.cache_contents import CacheContents, state_row
from interposer_models._engine.prefix_match import Match, PrefixSearch, Tail, common_prefix_length
from interposer_models._engine.prefix_pages import PrefixPool, page_key, page_keys
from interposer_models._engine.prefix_statistics import PrefixStatistics
from interposer_models._engine.prefix_store import PrefixStore
from interposer_models._engine.sequence import Sequence
from interposer_models._engine.state_checkpoints import StateCheckpoints

# A sequence waits for another one to compute a shared prefix only if it gains this many tokens.
_WORTH_TOKENS = 16
# A checkpoint splits a prompt into two steps; below this many tokens, recomputing is faster.
_LEAST_TOKENS = 64


class SharedPrefixes:
    """Prefix cache of an engine: gives new sequences computed pages and states of prefixes.

    Whole pages are shared. The page after the whole pages is copied as far as the tokens match.
    Layers with windows need the pages that the next token attends to; recurrent layers need a
    checkpoint after exactly the matching tokens.

    Attributes:
        statistics: Counts since the cache was created.
    """

    def __init__(
        self,
        pools: Items[PrefixPool],
        contents: CacheContents,
        checkpoints: StateCheckpoints | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Create an empty cache.

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
        self._awaited: dict[Sequence, tuple[Sequence, int]] = {}
        for pool_index, pool in enumerate(pools):
            pool.on_evict = partial(self._offload_page, pool_index)
        if store is not None:
            store.kinds[0].on_evict = self._drop_tail
            if checkpoints is not None:
                checkpoints.on_evict = self._store_state

    def plan_checkpoints(self, sequence: Sequence, running: Items[Sequence]) -> None:
        """Let older sequences save states where a new sequence diverges."""
        if self._checkpoints is None:
            return
        for other in takewhile(lambda other: other is not sequence, running):
            position = common_prefix_length(sequence, other, self._size) // self._size * self._size
            if position > other.num_computed and position not in other.checkpoint_positions:
                other.checkpoint_positions.append(position)

    def attach(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Give a sequence without pages the longest cached prefix, at most all but the last token.

        The last token is always computed, because the logits of the last token are needed.

        Args:
            running: All running sequences, the older ones first, including this one.
        Returns: False if the sequence must wait for an older sequence that is computing more of the
            prefix.
        """
        older = [*takewhile(lambda other: other is not sequence, running)]
        if sequence.num_missing_logprobs:
            # Prompt log probabilities need the logits of the prompt, which are not cached.
            page_keys(sequence, 0, self._size)
            self._begin(sequence, Match(0, None, 0, 0), running)
            return True
        awaited, end = self._awaited.pop(sequence, (sequence, 0))
        # Search again if the awaited sequence has ended, was preempted, or has computed the prefix.
        if awaited not in older or awaited.num_computed >= end:
            match = self._search.longest(sequence, running)
            shareable = ((self._future_prefix_length(sequence, other), other) for other in older)
            end, awaited = max(shareable, key=itemgetter(0), default=(0, sequence))
            if end - match.num_tokens < _WORTH_TOKENS:
                self._begin(sequence, match, running)
                return True
        self._awaited[sequence] = awaited, end
        return False

    def _begin(self, sequence: Sequence, match: Match, running: Items[Sequence]) -> None:
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

    def limit_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return ``num_tokens``, or fewer if the sequence reaches a checkpoint position before."""
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

    def register_computed(self, sequence: Sequence, first: int) -> None:
        """Register the pages that a sequence has filled since token ``first``."""
        if not sequence.page_keys:
            return
        size, stop = self._size, sequence.num_computed // self._size
        for number in range(first // size, stop):
            keys = page_keys(sequence, number + 1, size)
            tokens = sequence.tokens(number * size, (number + 1) * size)
            self._register(sequence, number, keys[number + 1], tokens)
        if self._checkpoints is not None and sequence.num_computed in sequence.checkpoint_positions:
            self._save_state(sequence, page_keys(sequence, stop, size)[stop])

    def detach(self, sequence: Sequence) -> None:
        """Register the last page and state of a sequence before both are freed."""
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

    def _future_prefix_length(self, sequence: Sequence, other: Sequence) -> int:
        """Return the common prefix length if ``other`` has yet to compute a part of it, else 0."""
        # A sequence that decodes computes no more of its prompt.
        if len(other) - other.num_computed <= 1:
            return 0
        end = common_prefix_length(sequence, other, self._size)
        if self._checkpoints is not None:
            end = max(
                (position for position in other.checkpoint_positions if position <= end), default=0
            )
        return end if end > other.num_computed else 0

    def _checkpoint_positions(self, sequence: Sequence, num_known_pages: int) -> set[int]:
        """Return the numbers of tokens after which to save the state of a sequence.

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

    def _load_match(self, sequence: Sequence, match: Match) -> bool:
        """Give a sequence the matching pages and state; return False if too few pages are free."""
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

    def _register(self, sequence: Sequence, number: int, key: bytes, tokens: list[int]) -> None:
        """Register a page of a sequence in all pools in which the sequence still holds the page."""
        for pool, pages in zip(self._pools, sequence.pages, strict=True):
            # The page may have left the window of this pool already.
            if pages[number] != pool.zero_page:
                pool.register(key, pages[number])
        if self._pools[0].has_key(key):
            self._search.tails.add(sequence.page_keys[number], key, tokens)

    def _save_state(self, sequence: Sequence, key: bytes) -> None:
        assert self._checkpoints is not None
        # The state is not usable if it includes rejected draft tokens.
        if sequence.state_tokens == sequence.num_computed:
            self._checkpoints.save(key, sequence.state_slot)

    def _offload_page(self, pool_index: int, key: bytes, page: int) -> None:
        """Store an evicted page if there is a store."""
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
