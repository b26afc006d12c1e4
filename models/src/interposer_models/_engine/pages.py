"""Pools of cache pages and of state slots, which running sequences share."""

from __future__ import annotations

import heapq

from interposer.errors import RequestError


class PagePool:
    """Hands out pages, the lowest number first, so that a lone sequence is contiguous in memory.

    Args:
        num_slots: Number of state slots, one per sequence; 0 if the model keeps no states.
        seen_tokens: Window of the layers that use the pages: the number of tokens that a token
            attends to, including the token; None for full attention.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int = 0, seen_tokens: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.seen_tokens = seen_tokens
        self._free: list[int] = []  # heap of the pages that were returned
        self._first_new = 0  # pages from this number on were never handed out
        self._free_slots = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free) + self.num_pages - self._first_new

    @property
    def zero_page(self) -> int:
        """Number of the zero-filled page after the last one, which replaces freed pages."""
        return self.num_pages

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The state slots that no sequence holds."""
        return tuple(self._free_slots)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def longest(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens a sequence can have, alone in the pool."""
        window = self.seen_tokens
        if window is not None and window_pages(window, self.page_size) <= self.num_pages:
            return num_tokens
        return min(num_tokens, self.num_pages * self.page_size)

    def step_capacity(self, num_computed: int, num_pages: int) -> int:
        """Return how many tokens a sequence can add in one step.

        Args:
            num_pages: Most pages that the sequence may hold in that step.
        """
        return (self.num_unseen_pages(num_computed) + num_pages) * self.page_size - num_computed

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow ``pages`` to hold ``num_tokens`` tokens; return False if too few pages are free."""
        num_missing = self.pages_for(num_tokens) - len(pages)
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            if self._free:
                pages.append(heapq.heappop(self._free))
            else:
                pages.append(self._first_new)
                self._first_new += 1
        return True

    def shrink(self, pages: list[int], num_tokens: int) -> None:
        """Return the pages after those that hold ``num_tokens`` tokens to the pool."""
        surplus = pages[self.pages_for(num_tokens) :]
        del pages[len(pages) - len(surplus) :]
        self.release(surplus)

    def trim(self, pages: list[int], num_computed: int) -> None:
        """Replace pages that no later token attends to by the zero page, and free the pages."""
        # Walk backwards: all pages before one that was freed earlier are freed already.
        for index in range(self.num_unseen_pages(num_computed) - 1, -1, -1):
            if pages[index] == self.zero_page:
                return
            self._take_back(pages[index])
            pages[index] = self.zero_page

    def release(self, pages: list[int]) -> None:
        """Return all of ``pages`` to the pool, and empty the list."""
        # In reverse order the first pages of the sequence are released last and evicted last.
        for page in reversed(pages):
            if page != self.zero_page:
                self._take_back(page)
        pages.clear()

    def take_slot(self) -> int:
        """Take the lowest free state slot; return -1 if none is free."""
        return heapq.heappop(self._free_slots) if self._free_slots else -1

    def return_slot(self, slot: int) -> None:
        """Free a state slot; -1 stands for none."""
        if slot >= 0:
            heapq.heappush(self._free_slots, slot)

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if ``num_tokens`` tokens do not fit even into an idle pool."""
        if self.longest(num_tokens) < num_tokens:
            raise RequestError(
                f"The request needs {num_tokens} cached tokens, the cache holds "
                f"{self.num_pages * self.page_size}. Try: load(..., cache_tokens={num_tokens})"
            )

    def num_unseen_pages(self, num_computed: int) -> int:
        """Return the number of first pages that no token after the first ``num_computed`` sees."""
        if self.seen_tokens is None:
            return 0
        return max(0, num_computed - self.seen_tokens + 1) // self.page_size

    def _take_back(self, page: int) -> None:
        heapq.heappush(self._free, page)


def window_pages(seen_tokens: int, page_size: int) -> int:
    """Return the most pages that ``seen_tokens`` consecutive tokens can touch."""
    return -(-(seen_tokens - 1) // page_size) + 1
