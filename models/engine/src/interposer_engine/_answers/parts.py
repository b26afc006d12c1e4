"""The parts into which an answer is parsed, as a stream and as a whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the text that the user sees."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of one tool call.

    Attributes:
        index: Number of the call in the answer, from 0.
        name: Name of the tool, in the first part of the call; "" in later parts.
        id: Id that the model gave the call. It is in the first part, or in a later one if the
            format writes the id after the arguments; "" in all other parts.
        arguments: The next piece of the arguments' JSON text.
    """

    index: int
    name: str = ""
    id: str = ""
    arguments: str = ""


Part = TextPart | ReasoningPart | CallPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        name: Name of the tool.
        arguments: Text of a JSON object.
        id: Id that the model gave the call; "" if the format has no ids.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer.

    Attributes:
        content: Text that the user sees.
        reasoning: The model's reasoning.
        calls: The complete calls, in order.
        note: Why a call was returned as text or left out; "" if all calls are complete.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    note: str = ""
