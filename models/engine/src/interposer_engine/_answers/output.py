"""Collection of the parts of an answer, as a stream and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from interposer_engine._answers.parts import (
    CallPart,
    ParsedAnswer,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
)


class Flow:
    """A text that markers interrupt.

    White space before the first piece of text is dropped. Between two pieces that only markers
    separate, white space is kept; if there is none, a newline is added.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space: list[str] = []
        self._is_after_marker = False
        self.is_empty = True

    def push(self, text: str) -> None:
        """Append text. White space at the end is held back until more text comes."""
        stripped = text.rstrip()
        if not stripped:
            self._space += [text] if text else []
            return
        if self._is_after_marker and self.is_empty:
            # White space between a marker and the first text is layout of the format.
            self._space.clear()
            stripped = stripped.lstrip()
        elif self._is_after_marker and not self._space and not text[0].isspace():
            self._space.append("\n")
        self._emit("".join(self._space) + stripped)
        self._space = [text[len(text.rstrip()) :]]
        self._is_after_marker = self.is_empty = False
        if not self._space[0]:
            self._space.clear()

    def marker(self) -> None:
        """Declare that a marker interrupts the text."""
        self._is_after_marker = True

    def end(self) -> None:
        """Emit the held-back white space, unless it is next to a marker."""
        if self._space and not self._is_after_marker:
            self._emit("".join(self._space))
        self._space.clear()


class Output:
    """The parts of an answer.

    Attributes:
        text: Text for the user.
        reasoning: Reasoning of the model.
    """

    def __init__(self) -> None:
        self.text = Flow(lambda text: self._add(TextPart(text)))
        self.reasoning = Flow(lambda text: self._add(ReasoningPart(text)))
        self.reasoning.marker()
        self._parts: list[Part] = []
        self._answer: list[TextPart | ReasoningPart | ToolCall] = []
        self._notes: list[str] = []
        self._open_call: ToolCall | None = None
        self._arguments: list[str] = []
        self._num_calls = 0

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._open_call is not None

    def _add(self, part: TextPart | ReasoningPart) -> None:
        self._parts.append(part)
        self._answer.append(part)

    def begin_call(self, name: str, call_id: str) -> None:
        """Begin a call with a complete name."""
        self.text.marker()
        self._open_call = ToolCall(name, "", call_id)
        self._arguments = []
        self._parts.append(CallPart(self._num_calls, name, call_id))
        self._num_calls += 1

    def arguments(self, piece: str) -> None:
        """Append to the JSON text of the arguments."""
        self._arguments.append(piece)
        self._parts.append(CallPart(self._num_calls - 1, arguments=piece))

    def finish_call(self) -> None:
        """End the call."""
        assert self._open_call is not None
        call, self._open_call = self._open_call, None
        self._answer.append(ToolCall(call.name, "".join(self._arguments), call.id))
        self._arguments = []

    def drop_call(self, reason: str) -> None:
        """Leave out the last call because of ``reason``."""
        assert self._open_call is not None
        self.note(f"the call of {self._open_call.name!r} was left out: {reason}")
        self._open_call = None
        self._arguments = []

    def note(self, note: str) -> None:
        """Add a note on a malformed call."""
        self._notes.append(note)

    def end(self) -> None:
        """End the answer."""
        self.text.end()

    def drain(self) -> list[Part]:
        """Return the parts since the last time; neighbours of the same kind are joined."""
        groups: list[list[Part]] = []
        for part in self._parts:
            last = groups[-1][0] if groups else None
            if type(last) is type(part) and (
                not isinstance(part, CallPart)
                or (isinstance(last, CallPart) and last.index == part.index)
            ):
                groups[-1].append(part)
            else:
                groups.append([part])
        self._parts = []
        return [_joined(group) for group in groups]

    @property
    def answer(self) -> ParsedAnswer:
        """The answer so far."""
        parts: list[TextPart | ReasoningPart | ToolCall] = []
        for _, group in groupby(self._answer, type):
            first, *following = group
            if isinstance(first, ToolCall):
                parts += [first, *following]
            else:
                texts = [part.text for part in following if not isinstance(part, ToolCall)]
                parts.append(type(first)("".join([first.text, *texts])))
        return ParsedAnswer(
            "".join(part.text for part in parts if isinstance(part, TextPart)),
            "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
            tuple(part for part in parts if isinstance(part, ToolCall)),
            "; ".join(self._notes),
            tuple(parts),
        )


def _joined(parts: list[Part]) -> Part:
    first = parts[0]
    if isinstance(first, CallPart):
        arguments = "".join(part.arguments for part in parts if isinstance(part, CallPart))
        return CallPart(first.index, first.name, first.id, arguments)
    text = "".join(part.text for part in parts if not isinstance(part, CallPart))
    return type(first)(text)
