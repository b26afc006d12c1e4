"""Readers that split an answer into text, reasoning and tool calls while its tokens arrive."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interposer.errors import RequestError
from interposer_engine._answers.parts import (
    CallPart,
    ParsedAnswer,
    Part,
    TextPart,
    ToolCall,
)

if TYPE_CHECKING:
    from interposer_engine._answers.parser import AnswerParser


class AnswerReader(ABC):
    """Reads one answer, token by token."""

    @abstractmethod
    def push(self, token_id: int, text: str, *, is_last: bool) -> Sequence[Part]:
        """Read the next token of the answer, and return the parts that it completes.

        Args:
            text: Text that the token completes, without special tokens, as in ``Delta``.
            is_last: Whether the answer ends with this token.
        """

    @property
    @abstractmethod
    def answer(self) -> ParsedAnswer:
        """The answer so far; complete after the last token."""


class PlainReader(AnswerReader):
    """Reads every token as text, for models and requests without reasoning and tool calls."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def push(self, token_id: int, text: str, *, is_last: bool) -> Sequence[Part]:
        """Return the text of the token, if it has any."""
        if not text:
            return ()
        self._texts.append(text)
        return (TextPart(text),)

    @property
    def answer(self) -> ParsedAnswer:
        """The text so far."""
        return ParsedAnswer("".join(self._texts))


class FormatReader(AnswerReader):
    """Reads an answer in one of the known formats."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, token_id: int, text: str, *, is_last: bool) -> Sequence[Part]:
        """Return the parts that the token completes; after the last token, all that are left."""
        parts = self._parser.push(token_id, text)
        return [*parts, *self._parser.end()] if is_last else parts

    @property
    def answer(self) -> ParsedAnswer:
        """The answer so far; complete after the last token."""
        return self._parser.answer


class TemplateReader(AnswerReader):
    """Reads an answer by the checkpoint's response template, which needs the complete answer."""

    def __init__(self, parse: Callable[[list[int]], Mapping[str, Any]]) -> None:
        """Create the reader.

        Args:
            parse: Parses the tokens of a complete answer, as ``ChatRenderer.parsed``.
        """
        self._parse = parse
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._answer = ParsedAnswer("")

    def push(self, token_id: int, text: str, *, is_last: bool) -> Sequence[Part]:
        """Return no parts before the last token, and then all parts of the answer."""
        self._token_ids.append(token_id)
        self._texts.append(text)
        if not is_last:
            return ()
        try:
            message = self._parse(self._token_ids)
            calls = tuple(map(_call, message.get("tool_calls") or ()))
        except RequestError as error:
            self._answer = ParsedAnswer("".join(self._texts), note=str(error))
        else:
            self._answer = ParsedAnswer(
                message.get("content") or "", message.get("thinking") or "", calls
            )
        return parts_of(self._answer)

    @property
    def answer(self) -> ParsedAnswer:
        """The answer; empty before the last token."""
        return self._answer


def parts_of(answer: ParsedAnswer) -> list[Part]:
    """Return the parts of a complete answer, each call in one part."""
    parts: list[Part] = []
    num_calls = 0
    for part in answer.parts:
        if isinstance(part, ToolCall):
            parts.append(CallPart(num_calls, part.name, part.id, part.arguments))
            num_calls += 1
        else:
            parts.append(part)
    return parts


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RequestError("a call was returned as text: its arguments are no JSON") from None
    return ToolCall(function.get("name", ""), json.dumps(arguments, ensure_ascii=False))
