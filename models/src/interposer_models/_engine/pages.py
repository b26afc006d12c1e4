"""The pool of cache pages that sequences share."""

from __future__ import annotations

import heapq

from interposer.errors import RequestError


class PagePool:
    """Hands out pages, lowest number first, so that a lone sequence lies in one run of memory."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        """Return how many pages nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow ``pages`` until they hold ``num_tokens`` tokens, or change nothing and say False."""
        wanted = self.pages_for(num_tokens) - len(pages)
        if wanted > len(self._free):
            return False
        pages.extend(heapq.heappop(self._free) for _ in range(wanted))
        return True

    def release(self, pages: list[int]) -> None:
        """Take back all of ``pages`` and empty the list."""
        for page in pages:
            heapq.heappush(self._free, page)
        pages.clear()

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if ``num_tokens`` tokens never fit, however idle the pool is."""
        if self.pages_for(num_tokens) > self.num_pages:
            raise RequestError(
                f"The request needs {num_tokens} cached tokens, the cache holds "
                f"{self.num_pages * self.page_size}. Try: load(..., cache_tokens={num_tokens})"
            )
