"""Interface of an engine's adapter, and the capacity of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "MAX_BATCH",
    "MAX_CONTEXT",
    "MAX_STEP_TOKENS",
    "BatchEngine",
    "Engine",
    "Settings",
    "Unsupported",
]

# Token limits: of one request (prompt and new tokens), and of all requests together.
MAX_CONTEXT = 1280
MAX_BATCH = 8
# Prefill runs in one step, overriding a library's default.
MAX_STEP_TOKENS = 2048


class Unsupported(Exception):
    """The library does not support a measurement; the text says what the library does instead."""


@dataclass(frozen=True)
class Settings:
    """Settings for loading an engine, in addition to its option.

    Attributes:
        context: maximum tokens of one request; the limit for all requests together is
            MAX_STEP_TOKENS, or ``context`` times half of the requests.
        prefixes: reuse cached prefixes of earlier prompts.
        guesses: use prompt-lookup speculative decoding with at most four draft tokens.
        adapters: PEFT folders that requests can name; llama.cpp reads the ``.gguf`` beside each.
        requests: maximum number of concurrent requests.
    """

    context: int = MAX_CONTEXT
    prefixes: bool = False
    guesses: bool = False
    adapters: tuple[str, ...] = ()
    requests: int = MAX_BATCH

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Settings:
        """Parse settings from JSON."""
        return cls(**{**fields, "adapters": tuple(fields["adapters"])})

    @property
    def cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens: for all requests, and for kept prefixes."""
        return MAX_STEP_TOKENS if self == Settings() else self.requests // 2 * self.context


class Engine(Protocol):
    """A loaded model that decodes greedily and ignores end-of-sequence tokens."""

    def reserve(self, batch: int, tokens: int) -> None:
        """Reserve cache for ``batch`` requests of at most ``tokens`` tokens; not timed."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        """Prefill prompts of equal length and return the first new token of each.

        ``new_tokens`` is the final number of new tokens of each, including this one.
        """

    def step(self) -> list[int]:
        """Decode one step and return the next token of each request."""

    def end(self) -> None:
        """Release the cache of the requests."""

    def facts(self) -> dict[str, object]:
        """Report versions, sizes and settings."""


class BatchEngine(Engine, Protocol):
    """Engine of ``batch_kinds.py``, with prefill and decode in the same step.

    A method that the library cannot support raises Unsupported before anything is timed.
    """

    def extend(self, prompt: list[int], known: int) -> list[int]:
        """Prefill a prompt that shares its first ``known`` tokens with the previous request.

        Returns: the first new token. Only called with ``prefixes``.
        """

    def join(self, prompt: list[int]) -> None:
        """Add a request for one token to the running ones in the next ``step``."""

    def several(self) -> list[list[int]]:
        """Decode one step and return the new tokens of each request, several if speculated."""

    def draw(self, temperature: float, seed: int) -> None:
        """Set the sampling temperature of later requests; 0 is greedy."""

    def use_adapters(self, numbers: list[int | None]) -> None:
        """Use these adapters for the requests of the next ``prefill``; None means no adapter.

        If all are None, layers run as if no adapter was loaded, where the library supports that.
        """
