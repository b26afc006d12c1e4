"""Sizes of prompts that are refused before any work grows with them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

from interposer_serve._errors import ApiError


class PromptSizes:
    """The largest prompts that a model can take.

    Attributes:
        num_tokens: of one prompt.
        num_characters: of its text. None of the tokens has more characters than the longest one of
            the vocabulary, so that a longer text has too many tokens; None where that is unknown.
        num_prompts: of one request.
    """

    def __init__(self, num_tokens: int, num_prompts: int, vocabulary: Collection[str]) -> None:
        longest = max(map(len, vocabulary), default=0)
        self.num_tokens = num_tokens
        self.num_prompts = num_prompts
        self.num_characters = num_tokens * longest or None

    def check(self, body: dict[str, Any]) -> None:
        """Refuse a body with more than can be taken, whatever else it holds.

        Raises: ApiError: there are too many prompts, tokens or characters.
        """
        for name in ("prompt", "input"):
            value = body.get(name)
            if isinstance(value, str):
                self._check_text(name, value)
            elif isinstance(value, list):
                self._check_list(name, value)
        tokens = body.get("tokens")
        if isinstance(tokens, list):
            self._check_tokens("tokens", tokens)
        for name in ("messages", "tools"):
            value = body.get(name)
            if isinstance(value, list) and self.num_characters is not None:
                self._check_characters(name, _num_characters(value))

    def _check_list(self, name: str, value: list[Any]) -> None:
        if value and isinstance(value[0], int | float):
            self._check_tokens(name, value)
            return
        if len(value) > self.num_prompts:
            raise ApiError(
                400,
                f"{name} has {len(value)} items; allowed are {self.num_prompts} in one request",
                param=name,
                code="too_many_items",
            )
        for each in value:
            if isinstance(each, str):
                self._check_text(name, each)
            elif isinstance(each, list):
                self._check_tokens(name, each)

    def _check_tokens(self, name: str, value: list[Any]) -> None:
        # Whatever is nearly right has an error that says more.
        if len(value) > 2 * self.num_tokens:
            raise ApiError(
                400,
                f"{name} has {len(value)} tokens; allowed are {self.num_tokens}",
                param=name,
                code="context_length_exceeded",
            )

    def _check_text(self, name: str, text: str) -> None:
        self._check_characters(name, len(text))

    def _check_characters(self, name: str, count: int) -> None:
        if self.num_characters is not None and count > self.num_characters:
            raise ApiError(
                400,
                f"{name} has {count} characters, and {self.num_tokens} tokens, which are allowed, "
                f"have {self.num_characters} at most",
                param=name,
                code="context_length_exceeded",
            )


def _num_characters(value: list[Any]) -> int:
    """Return the characters of all texts in a JSON value but for names of fields."""
    count = 0
    level: list[Any] = [value]
    while level:
        values = [*chain.from_iterable(v.values() if type(v) is dict else v for v in level)]
        # What is numbers alone is looked at by the interpreter, not by a loop.
        kinds = set(map(type, values))
        if str in kinds:
            count += sum(len(each) for each in values if type(each) is str)
        has_more = not kinds.isdisjoint((dict, list))
        level = [each for each in values if type(each) in (dict, list)] if has_more else []
    return count
