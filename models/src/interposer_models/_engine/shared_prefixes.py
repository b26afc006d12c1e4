"""Sequences with equal beginnings share what is computed of these: pages, and copies of states.

Dimensions: S page size.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from itertools import takewhile
from operator import itemgetter

from interposer_models._engine.cache_contents import CacheContents, state_row
from interposer_models._engine.prefix_match import Match, PrefixSearch, Tail, agreeing_tokens
from interposer_models._engine.prefix_pages import PrefixPool, page_key, page_keys
from interposer_models._engine.prefix_statistics import PrefixStatistics
from interposer_models._engine.prefix_store import PrefixStore
from interposer_models._engine.sequence import Sequence
from interposer_models._engine.state_checkpoints import StateCheckpoints

_WORTH_TOKENS = 16
# Of states: fewer tokens are computed again sooner than two steps take in place of one.
_LEAST_TOKENS = 64


class SharedPrefixes:
    """Gives sequences that begin what others have computed of their first tokens.

    Whole pages are shared. The page behind them is copied, as far as its tokens agree. Layers with
    windows have to have what the next token sees, and layers with states a checkpoint after exactly
    these tokens.

    Attributes:
        statistics: since it was made.
    """

    def __init__(
        self,
        pools: Items[PrefixPool],
        contents: CacheContents,
        checkpoints: StateCheckpoints | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Know nothing yet.

        Args:
            contents: of the pages of the pools, and of the rows of states.
            checkpoints: of the states; None where the model has none.
            store: takes what pools and checkpoints give up, in kinds of rows of this order.
        """
        self.statistics = PrefixStatistics()
        self._pools = pools
        self._size = pools[0].page_size
        self._contents = contents
        self._checkpoints = checkpoints
        self._store = store
        self._search = PrefixSearch(pools, checkpoints, store)
        self._kept: frozenset[bytes] = frozenset()
        # Who waits, for whom, and until so many tokens are computed.
        self._awaited: dict[Sequence, tuple[Sequence, int]] = {}
        for place, pool in enumerate(pools):
            pool.on_evict = partial(self._give_up, place)
        if store is not None:
            store.kinds[0].on_evict = self._drop_tail
            if checkpoints is not None:
                checkpoints.on_evict = self._store_state

    def expect(self, sequence: Sequence, running: Items[Sequence]) -> None:
        """Let older sequences keep their states where a new one goes another way."""
        if self._checkpoints is None:
            return
        for other in takewhile(lambda other: other is not sequence, running):
            border = agreeing_tokens(sequence, other, self._size) // self._size * self._size
            if border > other.num_computed and border not in other.borders:
                other.borders.append(border)

    def join(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Give a sequence without pages what there is of its first tokens, but for the last one.

        The last token is computed in any case, as its logits are wanted.

        Args:
            running: all sequences that are, the older ones first, and this one among them.
        Returns: False where an older one computes more of these tokens now, so that it has to wait.
        """
        older = [*takewhile(lambda other: other is not sequence, running)]
        if sequence.num_untold:
            # Whoever is told of a prompt computes it: pages hold no logits.
            page_keys(sequence, 0, self._size)
            self._begin(sequence, Match(0, None, 0, 0), running)
            return True
        awaited, end = self._awaited.pop(sequence, (sequence, 0))
        if awaited not in older or awaited.num_computed >= end:
            match = self._search.longest(sequence, running)
            reaches = ((self._reach(sequence, other), other) for other in older)
            end, awaited = max(reaches, key=itemgetter(0), default=(0, sequence))
            if end - match.num_tokens < _WORTH_TOKENS:
                self._begin(sequence, match, running)
                return True
        self._awaited[sequence] = awaited, end
        return False

    def _begin(self, sequence: Sequence, match: Match, running: Items[Sequence]) -> None:
        if not self._take(sequence, match):
            # No page is free to bring something back to: what needs none is taken.
            match = self._search.longest(sequence, running, needs_pages=False)
            self._take(sequence, match)
        sequence.num_computed = sequence.num_shared = match.num_tokens
        self.statistics.tokens += len(sequence)
        self.statistics.shared_tokens += sequence.num_computed
        if self._checkpoints is not None:
            sequence.state_tokens = sequence.num_computed
            sequence.borders += self._borders(sequence, match.known)

    def cut(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of ``wanted`` tokens there are up to where a state is to be kept."""
        done = sequence.num_computed
        return min([wanted, *(border - done for border in sequence.borders if border > done)])

    def learn(self, sequence: Sequence, first: int) -> None:
        """Know what a sequence has computed since it had ``first`` tokens, if it joined."""
        if not sequence.page_keys:
            return
        size, stop = self._size, sequence.num_computed // self._size
        for number in range(first // size, stop):
            keys = page_keys(sequence, number + 1, size)
            tokens = sequence.tokens(number * size, (number + 1) * size)
            self._know(sequence, number, keys[number + 1], tokens)
        if self._checkpoints is not None and sequence.num_computed in sequence.borders:
            self._keep_state(sequence, page_keys(sequence, stop, size)[stop])

    def leave(self, sequence: Sequence) -> None:
        """Know the last page and the state of a sequence that is about to give them back."""
        self._awaited.pop(sequence, None)
        count, rest = divmod(sequence.num_computed, self._size)
        if not (sequence.page_keys and sequence.num_computed):
            return
        key = page_keys(sequence, count, self._size)[count]
        if rest:
            tokens = sequence.tokens(count * self._size, sequence.num_computed)
            key = page_key(key, tokens)
            self._know(sequence, count, key, tokens)
        if self._checkpoints is not None:
            self._keep_state(sequence, key)

    def forget(self) -> None:
        """Know nothing any more, as after other weights."""
        for each in (*self._pools, self._checkpoints, self._store):
            if each is not None:
                each.forget()
        self._search.tails.clear()

    def _reach(self, sequence: Sequence, other: Sequence) -> int:
        """Return how many first tokens of a sequence another one will have computed; 0 if none.

        Those that it has computed already do not count.
        """
        if len(other) - other.num_computed <= 1:
            return 0
        end = agreeing_tokens(sequence, other, self._size)
        if self._checkpoints is not None:
            end = max((border for border in other.borders if border <= end), default=0)
        return end if end > other.num_computed else 0

    def _borders(self, sequence: Sequence, known: int) -> set[int]:
        """Return after how many tokens the state of a sequence is to be kept.

        That is at the end of the last page, of the pages that others have had too, and before
        ends of the prompt of 64, 128, 256 and so on tokens: whoever shares all but an end of any
        length computes about twice that at most.
        """
        size, last = self._size, len(sequence) - 1
        borders, gap = {last // size * size}, _LEAST_TOKENS
        while gap < last:
            borders.add((last - gap) // size * size)
            gap *= 2
        return {border for border in borders if border >= _LEAST_TOKENS} | {known * size}

    def _take(self, sequence: Sequence, match: Match) -> bool:
        """Give a sequence what was found, or nothing, and say False, where pages are missing."""
        num_tokens, tail = match.num_tokens, match.tail
        keys = sequence.page_keys[1 : match.count + 1]
        key = tail.key if tail is not None else keys[-1] if keys else b""
        self._kept = frozenset((*keys, key))
        try:
            for place in range(len(self._pools)):
                if not self._take_pages(sequence.pages[place], place, keys, tail, num_tokens):
                    for pool, pages in zip(self._pools, sequence.pages, strict=True):
                        pool.release(pages)
                    return False
        finally:
            self._kept = frozenset()
        if self._checkpoints is not None and num_tokens:
            if self._checkpoints.knows(key):
                self._checkpoints.restore(key, sequence.state_slot)
            else:
                assert self._store is not None  # where it was found
                parts = state_row(self._contents.states, sequence.state_slot)
                self._store.get(len(self._pools), key, parts)
        return True

    def _take_pages(
        self, pages: list[int], place: int, keys: list[bytes], tail: Tail | None, num_tokens: int
    ) -> bool:
        pool, store, contents = self._pools[place], self._store, self._contents
        unseen = min(pool.num_unseen(num_tokens), len(keys))
        wanted = keys[unseen:]
        pages += [pool.hold(key) if pool.knows(key) else pool.zero_page for key in wanted]
        missing = [number for number, page in enumerate(pages) if page == pool.zero_page]
        # It must not go for what is taken now.
        source = [pool.hold(tail.key)] if tail is not None and pool.knows(tail.key) else []
        fresh: list[int] = []
        done = pool.extend(fresh, (len(missing) + (tail is not None)) * self._size)
        if done:
            for number in missing:
                page = pages[number] = fresh.pop(0)
                assert store is not None  # where it was found
                store.get(place, wanted[number], contents.page(place, page))
                pool.know(wanted[number], page)
            self.statistics.restored_pages += len(missing)
            pages[:0] = [pool.zero_page] * unseen
            if tail is not None:
                pages += fresh
                if source or tail.pages:
                    contents.copy_page(place, (source or [tail.pages[place]])[0], fresh[0])
                else:
                    assert store is not None
                    store.get(place, tail.key, contents.page(place, fresh[0]))
                    self.statistics.restored_pages += 1
        pool.release(source)
        return done

    def _know(self, sequence: Sequence, number: int, key: bytes, tokens: list[int]) -> None:
        """Know a page of a sequence in all pools that have it still."""
        for pool, pages in zip(self._pools, sequence.pages, strict=True):
            if pages[number] != pool.zero_page:
                pool.know(key, pages[number])
        if self._pools[0].knows(key):
            self._search.tails.add(sequence.page_keys[number], key, tokens)

    def _keep_state(self, sequence: Sequence, key: bytes) -> None:
        assert self._checkpoints is not None
        if sequence.state_tokens == sequence.num_computed:
            self._checkpoints.keep(key, sequence.state_slot)

    def _give_up(self, place: int, key: bytes, page: int) -> None:
        """Store what a page holds, if there is a store."""
        self.statistics.evicted_pages += 1
        parts = [] if self._store is None else self._contents.page(place, page)
        if self._store is not None and self._store.put(place, key, parts, self._kept):
            self.statistics.stored_pages += 1
        elif place == 0:
            self._search.tails.remove(key)

    def _store_state(self, key: bytes, row: int) -> None:
        assert self._store is not None
        assert self._checkpoints is not None
        self._store.put(len(self._pools), key, state_row(self._checkpoints.kept, row), self._kept)

    def _drop_tail(self, key: bytes) -> None:
        if not self._pools[0].knows(key):
            self._search.tails.remove(key)
