"""The pools of cache pages and rows of states that sequences share."""

from __future__ import annotations

import heapq

from interposer.errors import RequestError


class PagePool:
    """Hands out pages, lowest number first, so that a lone sequence lies in one run of memory.

    Args:
        num_slots: sequences that can have a row of each state at once; 0 where there is no state.
        seen_tokens: that a token sees at most, itself included, in the layers whose pages these
            are; None sees all.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int = 0, seen_tokens: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.seen_tokens = seen_tokens
        self._free: list[int] = []  # a heap of those that came back
        self._first_new = 0
        self._free_slots = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Return how many pages nobody holds."""
        return len(self._free) + self.num_pages - self._first_new

    @property
    def zero_page(self) -> int:
        """The number that stands for pages that came back: of one behind the last, of zeros."""
        return self.num_pages

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The rows of the states that nobody holds."""
        return tuple(self._free_slots)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def longest(self, wanted: int) -> int:
        """Return how many of ``wanted`` tokens a sequence can have, however idle the pool is."""
        seen = self.seen_tokens
        if seen is not None and window_pages(seen, self.page_size) <= self.num_pages:
            return wanted
        return min(wanted, self.num_pages * self.page_size)

    def room(self, num_computed: int, num_pages: int) -> int:
        """Return how many tokens a sequence can add in one step.

        Args:
            num_pages: that it holds in that step at most.
        """
        return (self.num_unseen(num_computed) + num_pages) * self.page_size - num_computed

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow ``pages`` until they hold ``num_tokens`` tokens, or change nothing and say False."""
        wanted = self.pages_for(num_tokens) - len(pages)
        if wanted > self.num_free:
            return False
        for _ in range(wanted):
            if self._free:
                pages.append(heapq.heappop(self._free))
            else:
                pages.append(self._first_new)
                self._first_new += 1
        return True

    def shrink(self, pages: list[int], num_tokens: int) -> None:
        """Take back the pages behind those that hold ``num_tokens`` tokens."""
        surplus = pages[self.pages_for(num_tokens) :]
        del pages[len(pages) - len(surplus) :]
        self.release(surplus)

    def trim(self, pages: list[int], num_computed: int) -> None:
        """Take back pages that no token after the first ``num_computed`` sees."""
        for place in range(self.num_unseen(num_computed) - 1, -1, -1):
            if pages[place] == self.zero_page:
                return
            self._take_back(pages[place])
            pages[place] = self.zero_page

    def release(self, pages: list[int]) -> None:
        """Take back all of ``pages`` and empty the list."""
        for page in reversed(pages):
            if page != self.zero_page:
                self._take_back(page)
        pages.clear()

    def take_slot(self) -> int:
        """Return the lowest row of the states that nobody holds, -1 where there is none."""
        return heapq.heappop(self._free_slots) if self._free_slots else -1

    def return_slot(self, slot: int) -> None:
        """Take back a row; -1 is none."""
        if slot >= 0:
            heapq.heappush(self._free_slots, slot)

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if ``num_tokens`` tokens never fit, however idle the pool is."""
        if self.longest(num_tokens) < num_tokens:
            raise RequestError(
                f"The request needs {num_tokens} cached tokens, the cache holds "
                f"{self.num_pages * self.page_size}. Try: load(..., cache_tokens={num_tokens})"
            )

    def num_unseen(self, num_computed: int) -> int:
        """Return how many pages no token after the first ``num_computed`` sees."""
        if self.seen_tokens is None:
            return 0
        return max(0, num_computed - self.seen_tokens + 1) // self.page_size

    def _take_back(self, page: int) -> None:
        """Take a page back from one that held it."""
        heapq.heappush(self._free, page)


def window_pages(seen_tokens: int, page_size: int) -> int:
    """Return how many pages ``seen_tokens`` tokens lie in at most, wherever the first one is."""
    return -(-(seen_tokens - 1) // page_size) + 1
