"""Readers of answers: text, reasoning and tool calls, while the tokens arrive.

A checkpoint writes reasoning and tool calls in a format of its own, which follows from the chat
template. ``AnswerReader`` hides these formats.
"""

from __future__ import annotations

from interposer_engine._answer_reader import AnswerReader, PlainReader
from interposer_engine._answers.parts import (
    CallPart,
    ParsedAnswer,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
)

__all__ = [
    "AnswerReader",
    "CallPart",
    "ParsedAnswer",
    "Part",
    "PlainReader",
    "ReasoningPart",
    "TextPart",
    "ToolCall",
]
