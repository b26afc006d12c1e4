"""The contract of a contender, and the room that it keeps in its cache."""

from __future__ import annotations

from typing import Protocol

__all__ = ["MAX_BATCH", "MAX_CONTEXT", "MAX_STEP_TOKENS", "Contender"]

# Of one request, prompt and new tokens; of all requests at once.
MAX_CONTEXT = 1280
MAX_BATCH = 8
# Prompts are computed in one step, whatever the library's default is.
MAX_STEP_TOKENS = 2048


class Contender(Protocol):
    """A loaded model that decodes greedily, without looking for an end."""

    def reserve(self, batch: int, tokens: int) -> None:
        """Make room for ``batch`` requests of ``tokens`` in the end; this is not timed."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        """Compute prompts of one length and return the first new token of each.

        ``new_tokens`` is how many each will have in the end, this one included.
        """

    def step(self) -> list[int]:
        """Return the next token of each."""

    def end(self) -> None:
        """Give back what the requests hold."""

    def facts(self) -> dict[str, object]:
        """Return what else is worth to be noted: versions, sizes, settings."""
