"""Text that arrives in pieces, and generators that read the text.

A reading function is a generator. The generator yields when all available text is read, and
continues after ``Source.push``. A parser of such functions looks like a parser of complete text,
and examines each character a bounded number of times for any split of the text into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A reading function's generator; it yields to wait for text and returns its result."""

Sink = Callable[[str], None]


class Malformed(ValueError):
    """The text does not have the expected form."""


class Source:
    """The unread text, and a record of the text that was read."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Declare that no more text comes."""
        self._has_ended = True

    def start_record(self, text: str = "") -> None:
        """Record the text that is read from now on, after ``text``."""
        self._record = [text]

    def stop_record(self) -> str:
        """Stop recording and return the recorded text."""
        record, self._record = self._record or [], None
        return "".join(record)

    def peek(self) -> Steps[str]:
        """Return the next character and leave it unread; "" at the end of the answer."""
        while self._position >= len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._position]

    def take(self, count: int = 1) -> str:
        """Read available characters."""
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def read_run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Read and return all text that matches a repeated character class.

        Raises: Malformed: the text is longer than ``limit``.
        """
        pieces: list[str] = []
        available = limit
        while (yield from self.peek()):
            match = pattern.match(self._text, self._position, self._position + available + 1)
            if match is None:
                break
            pieces.append(self.take(match.end() - self._position))
            available -= len(pieces[-1])
            if available < 0:
                raise Malformed(f"a word is longer than {limit} characters")
        return "".join(pieces)

    def read_space(self) -> Steps[str]:
        """Read and return white space."""
        pieces: list[str] = []
        while (yield from self.peek()).isspace():
            match = _SPACE.match(self._text, self._position)
            pieces.append(self.take(match.end() - self._position if match else 1))
        return "".join(pieces)

    def read_literal(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if the text continues with it; return whether it was read."""
        while not self._text.startswith(literal, self._position):
            available = self._text[self._position : self._position + len(literal)]
            if self._has_ended or not literal.startswith(available):
                return False
            yield
        self.take(len(literal))
        return True

    def read_until(self, stops: Iterable[str], sink: Sink, limit: int | None = None) -> Steps[str]:
        """Pass text to ``sink`` until one of ``stops``, and read and return that one.

        Of stops that begin at the same character, the longest counts. The result is "" if the
        answer ends first.

        Raises: Malformed: there are more than ``limit`` characters before the first stop.
        """
        finder = _finder(tuple(sorted({stop for stop in stops if stop}, key=len, reverse=True)))
        while True:
            start = self._position
            span, partial = finder.find(self._text, start, limit)
            is_found = span is not None and (self._has_ended or span[0] < partial)
            end = len(self._text) if self._has_ended else partial
            end = span[0] if span is not None and is_found else end
            if limit is not None and end - start > limit:
                sink(self.take(limit))
                raise Malformed("a name is too long")
            if end > start:
                sink(self.take(end - start))
            if limit is not None:
                limit -= end - start
            if span is not None and is_found:
                return self.take(span[1] - span[0])
            if self._has_ended:
                return ""
            yield

    def unread(self, count: int) -> None:
        """Step back over the last ``count`` characters of the marker that was just read."""
        self._position -= count
        if self._record is not None:
            self._record[-1] = self._record[-1][:-count]


_SPACE = re.compile(r"\s+")


class _Finder:
    """Finds the first of several texts, and where an incomplete one begins at the end."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, stops)) or "(?!)")
        self._longest = max(map(len, stops), default=1)
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}

    def find(self, text: str, start: int, limit: int | None) -> tuple[tuple[int, int] | None, int]:
        """Return the span of the first stop, and where an incomplete stop begins at the end.

        A stop more than ``limit`` characters after ``start`` need not be found.
        """
        end = len(text) if limit is None else start + limit + self._longest
        match = self._pattern.search(text, start, end)
        partial = next(
            (
                position
                for position in range(max(start, len(text) - self._longest + 1), len(text))
                if text[position:] in self._prefixes
            ),
            len(text),
        )
        return match.span() if match else None, partial


@lru_cache(maxsize=256)
def _finder(stops: tuple[str, ...]) -> _Finder:
    return _Finder(stops)
