"""The pool of cache pages and rows of states that sequences share."""

from __future__ import annotations

import heapq

from interposer.errors import RequestError


class PagePool:
    """Hands out pages, lowest number first, so that a lone sequence lies in one run of memory.

    Args:
        num_slots: sequences that can have a row of each state at once; 0 where there is no state.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: list[int] = []  # a heap of those that came back
        self._first_new = 0
        self._free_slots = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Return how many pages nobody holds."""
        return len(self._free) + self.num_pages - self._first_new

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

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

    def release(self, pages: list[int]) -> None:
        """Take back all of ``pages`` and empty the list."""
        for page in pages:
            heapq.heappush(self._free, page)
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
        if self.pages_for(num_tokens) > self.num_pages:
            raise RequestError(
                f"The request needs {num_tokens} cached tokens, the cache holds "
                f"{self.num_pages * self.page_size}. Try: load(..., cache_tokens={num_tokens})"
            )
