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
        id: Id of the call, in the first part: the model's own, or a generated one if the chat
            template accepts only ids of a certain form. "" in later parts, and in formats without
            ids.
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
        id: Id of the call, as in its first part; "" if the format has no ids.
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
        parts: The same texts, reasoning and calls in the order in which the model wrote them. Two
            neighbours are never both text, nor both reasoning. By default reasoning, content and
            calls follow each other.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    note: str = ""
    parts: tuple[TextPart | ReasoningPart | ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            reasoning = (ReasoningPart(self.reasoning),) if self.reasoning else ()
            text = (TextPart(self.content),) if self.content else ()
            object.__setattr__(self, "parts", (*reasoning, *text, *self.calls))
