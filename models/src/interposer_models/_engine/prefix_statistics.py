"""Statistics of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixStatistics:
    """Counts of cached prompt tokens and pages; ``str`` describes the counts for people.

    Attributes:
        tokens: Tokens of all started sequences; a sequence that starts again counts again.
        shared_tokens: Number of prompt tokens that were cached.
        evicted_pages: Pages that were evicted for other tokens.
        stored_pages: Number of evicted pages that were offloaded to other memory.
        restored_pages: Pages that were restored from other memory.
    """

    tokens: int = 0
    shared_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    restored_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the tokens that were cached; 0 before the first sequence."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.shared_tokens} of {self.tokens} prompt tokens were in the cache "
            f"({self.hit_rate:.1%}), {self.evicted_pages} pages were given up"
        )
        if self.stored_pages:
            text += (
                f", of which {self.stored_pages} were stored and {self.restored_pages} came back"
            )
        return text
