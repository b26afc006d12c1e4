"""The contract of a contender, and the room that it keeps in its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "MAX_BATCH",
    "MAX_CONTEXT",
    "MAX_STEP_TOKENS",
    "BatchContender",
    "Contender",
    "Settings",
    "Unsupported",
]

# Of one request, prompt and new tokens; of all requests at once.
MAX_CONTEXT = 1280
MAX_BATCH = 8
# Prompts are computed in one step, whatever the library's default is.
MAX_STEP_TOKENS = 2048


class Unsupported(Exception):
    """The library does not do what a row asks for; the text says what it does instead."""


@dataclass(frozen=True)
class Settings:
    """The settings that a contender loads with beside its option.

    Attributes:
        context: tokens of one request at most; of all requests, MAX_STEP_TOKENS or as many times
            that as half of the requests.
        prefixes: what earlier prompts left in the cache is used again.
        guesses: tokens are looked up in the prompt and verified, four at most.
        adapters: folders of PEFT that requests may name; llama.cpp reads the ``.gguf`` beside each.
        requests: that run at once at most.
    """

    context: int = MAX_CONTEXT
    prefixes: bool = False
    guesses: bool = False
    adapters: tuple[str, ...] = ()
    requests: int = MAX_BATCH

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Settings:
        """Return the settings of JSON."""
        return cls(**{**fields, "adapters": tuple(fields["adapters"])})

    @property
    def cache_tokens(self) -> int:
        """The tokens of all requests, and of what is kept of earlier ones."""
        return MAX_STEP_TOKENS if self == Settings() else self.requests // 2 * self.context


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


class BatchContender(Contender, Protocol):
    """A contender of ``batch_kinds.py``, which mixes requests in a step.

    Whatever a library lacks raises Unsupported, before anything is timed.
    """

    def extend(self, prompt: list[int], known: int) -> list[int]:
        """Compute a prompt whose first ``known`` tokens the request before it had.

        Returns: its first token. A contender without ``prefixes`` is not asked.
        """

    def join(self, prompt: list[int]) -> None:
        """Let a request for one token join those that run, in the next ``step``."""

    def several(self) -> list[list[int]]:
        """Return the next tokens of each, of which a step with guesses may have several."""

    def draw(self, temperature: float, seed: int) -> None:
        """Draw the tokens of later requests by a temperature, where 0 is greedy."""

    def use_adapters(self, numbers: list[int | None]) -> None:
        """Let the requests of the next ``prefill`` use these adapters; None is none.

        Without adapters at all, layers are as if none was loaded, where the library can do so.
        """
