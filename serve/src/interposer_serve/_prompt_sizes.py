"""Limits on the size of prompts, checked before tokenization and validation."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

from interposer_serve._errors import ApiError


class PromptSizes:
    """Largest prompts that a model accepts.

    Attributes:
        num_tokens: Tokens of one prompt.
        num_characters: Characters of one prompt: ``num_tokens`` times the length of the longest
            token. A longer text always has too many tokens. None if the vocabulary is unknown.
        num_prompts: Prompts of one request.
    """

    def __init__(self, num_tokens: int, num_prompts: int, vocabulary: Collection[str]) -> None:
        longest = max(map(len, vocabulary), default=0)
        self.num_tokens = num_tokens
        self.num_prompts = num_prompts
        self.num_characters = num_tokens * longest or None  # 0 would refuse every text

    def check(self, body: dict[str, Any]) -> None:
        """Check the sizes of the prompts in a body that has not been validated yet.

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
        for prompt in value:
            if isinstance(prompt, str):
                self._check_text(name, prompt)
            elif isinstance(prompt, list):
                self._check_tokens(name, prompt)

    def _check_tokens(self, name: str, value: list[Any]) -> None:
        # Leave slightly long prompts to a later check, whose message has more detail.
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
                f"{name} has {count} characters; the allowed {self.num_tokens} tokens have at most "
                f"{self.num_characters} characters",
                param=name,
                code="context_length_exceeded",
            )


def _num_characters(value: list[Any]) -> int:
    """Return the number of characters of all texts in a JSON value, without names of fields."""
    count = 0
    level: list[Any] = [value]
    while level:
        values = [*chain.from_iterable(v.values() if type(v) is dict else v for v in level)]
        # set(map(type, ...)) runs in C: skip the slow Python loops for a long list of numbers.
        types = set(map(type, values))
        if str in types:
            count += sum(len(v) for v in values if type(v) is str)
        has_containers = not types.isdisjoint((dict, list))
        level = [v for v in values if type(v) in (dict, list)] if has_containers else []
    return count
