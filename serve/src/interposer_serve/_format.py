"""Base of the response formats: whole responses, and the events of streamed responses."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interposer_engine import Delta
from interposer_engine.answers import Part, PlainReader, ReasoningPart, TextPart
from interposer_serve._answer import Answer, Usage
from interposer_serve._errors import ApiError

to_json = json.JSONEncoder(ensure_ascii=False).encode
compact_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_MARK = "\0"

LargeFields = Mapping[str, Sequence[Callable[[], Any]]]
"""Functions that compute the items of lists, by the name of the list's field."""


def new_id(prefix: str, num_digits: int = 32) -> str:
    """Return a random id: a prefix and hexadecimal digits."""
    # uuid4 makes a system call, which would hand the GIL to the engine's thread for a while.
    return f"{prefix}{random.getrandbits(4 * num_digits):0{num_digits}x}"


class Format(ABC):
    """Writes the answers to one request in the format of an API.

    A stream consists of the first events, the events of each token and the last events.

    Attributes:
        has_frames: Whether all events between those of the first and the last token are equal
            except for their text, so that the rest can be reused.
    """

    has_frames = True

    def __init__(self) -> None:
        self._frames: dict[tuple[int, type[Part]], tuple[str, str] | None] = {}

    @abstractmethod
    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the fields of a whole response; large fields may be empty."""

    @abstractmethod
    def large_fields(self, answers: Sequence[Answer]) -> LargeFields:
        """Return the large fields of a whole response, whose items are serialized one by one."""

    def first_events(self, num_prompt_tokens: int) -> str:
        """Return the events before the first token."""
        return ""

    def events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return the events of an answer's newest token, which completed ``parts``."""
        newest = answer.newest
        if len(answer.deltas) == 1 or newest.finish_reason is not None or not self.has_frames:
            return self.write_events(answer, parts)
        if len(parts) == 1 and isinstance(part := parts[0], TextPart | ReasoningPart):
            # Reuse everything but the text.
            key = newest.index, type(part)
            if key not in self._frames:
                self._frames[key] = self._frame(newest.index, type(part))
            if frame := self._frames[key]:
                return f"{frame[0]}{to_json(part.text)}{frame[1]}"
        return self.write_events(answer, parts) if parts else ""

    def _frame(self, index: int, kind: type[TextPart | ReasoningPart]) -> tuple[str, str] | None:
        """Return what comes before and after the text in the events of a token."""
        deltas = [Delta(_MARK, 0, 0.0, None, index=index)] * 2
        events = self.write_events(Answer(PlainReader(), deltas), [kind(_MARK)])
        head, mark, tail = events.rpartition(to_json(_MARK))
        return (head, tail) if mark else None

    @abstractmethod
    def write_events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return the events of an answer's newest token, which completed ``parts``."""

    @abstractmethod
    def last_events(self, answers: Sequence[Answer], usage: Usage) -> str:
        """Return the events after the last token."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that an error ended."""
        return error.event()


def with_parts(fields: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """Return the JSON text of an object of which some parts are already serialized.

    Args:
        fields: Values to serialize, by field name.
        parts: Serialized values by field name, which replace values of ``fields``.
    """
    members = [
        f"{compact_json(name)}:{parts.get(name) or compact_json(value)}"
        for name, value in fields.items()
    ]
    for name, part in parts.items():
        if name not in fields:
            members.append(f"{compact_json(name)}:{part}")
    return "{" + ",".join(members) + "}"
