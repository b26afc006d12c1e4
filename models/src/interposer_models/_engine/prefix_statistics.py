"""The counts of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixStatistics:
    """Counts of the prompts that were looked up; the text is for people.

    Attributes:
        tokens: of the sequences that began, those that began again among them.
        shared_tokens: that were in the cache already.
        evicted_pages: whose content was given up for other tokens.
        stored_pages: of these, that were copied to other memory first.
        restored_pages: that came back from there.
    """

    tokens: int = 0
    shared_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    restored_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of tokens that were in the cache; 0 before there was any."""
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
