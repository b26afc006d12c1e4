"""Choice of the answer format of a checkpoint, by chat template or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from interposer.errors import RequestError, UnknownNameError
from interposer_engine._answers.formats import (
    FORMATS,
    AnswerFormat,
    CallFormat,
    ReasoningFormat,
)
from interposer_engine._answers.parser import AnswerParser

NONE = "none"
"""Override that turns reasoning or calls off."""


def detect(template: str) -> AnswerFormat | None:
    """Return the format that a chat template writes; None if no format is known.

    Args:
        template: Text of the chat template, or of all templates of a checkpoint.
    """
    for format in FORMATS:
        is_matching = any(all(text in template for text in group) for group in format.detected_by)
        if is_matching and not any(text in template for text in format.not_by):
            return _without_absent_markers(format, template)
    return None


def _without_absent_markers(format: AnswerFormat, template: str) -> AnswerFormat:
    """Return the format without reasoning and markers of text that the template does not write."""
    if format.builds_markers:
        return format
    if format.text_open.strip() not in template and format.text_close.strip() not in template:
        format = replace(format, text_open="", text_close="")
    reasoning = format.reasoning
    if reasoning is None or any(
        marker.strip() in template for marker in (reasoning.open, reasoning.close)
    ):
        return format
    return replace(format, reasoning=None)


def format_by_name(
    tool_format: str | None,
    reasoning_format: str | None,
    detected: AnswerFormat | None = None,
) -> AnswerFormat:
    """Return the detected format with overrides.

    Args:
        tool_format: Name of a format of tool calls; "none" for no calls; None for the detected one.
        reasoning_format: Name of a format of reasoning, likewise.
        detected: Format of the chat template.
    Raises:
        UnknownNameError: there is no format of that name.
        RequestError: calls and reasoning are one format, of which only one part is replaced.
    """
    base = detected or AnswerFormat("plain")
    _check_channels(base, tool_format, reasoning_format)
    if tool_format is not None:
        if tool_format not in (NONE, *_CALLS, *_CHANNELS):
            raise UnknownNameError("tool format", tool_format, tool_format_names())
        channels = _CHANNELS.get(tool_format)
        base = replace(
            base,
            name=tool_format,
            calls=_CALLS.get(tool_format),
            channels=channels.channels if channels else None,
        )
    if reasoning_format is not None:
        if reasoning_format not in (NONE, *_REASONING, *_CHANNELS):
            raise UnknownNameError("reasoning format", reasoning_format, reasoning_format_names())
        if reasoning_format not in _CHANNELS:
            base = replace(base, reasoning=_REASONING.get(reasoning_format))
        elif base.calls is None:
            base = _CHANNELS[reasoning_format]
    return base


def _check_channels(
    detected: AnswerFormat, tool_format: str | None, reasoning_format: str | None
) -> None:
    """Raise RequestError if only calls, or only reasoning, would be in channels."""
    default = detected.channels.name if detected.channels else None
    names = [tool_format or default, reasoning_format or default]
    for name in _CHANNELS:
        if name in names and any(other not in (name, None) for other in names):
            raise RequestError(
                f"Calls and reasoning are one format in {name}, so they cannot be chosen apart. "
                f"Try: both {name}, or both {NONE}"
            )


def tool_format_names() -> list[str]:
    """Return the names of the formats of tool calls, for overrides."""
    return sorted([NONE, *_CALLS, *_CHANNELS])


def reasoning_format_names() -> list[str]:
    """Return the names of the formats of reasoning, for overrides."""
    return sorted([NONE, *_REASONING, *_CHANNELS])


def parser_for(
    format: AnswerFormat,
    tokenizer: Any,
    prompt_tail: str,
    tools: Iterable[Mapping[str, Any]],
) -> AnswerParser:
    """Create a parser of the answer to a prompt.

    Args:
        format: How the checkpoint writes answers.
        tokenizer: Tokenizer of transformers, whose special tokens the markers may be.
        prompt_tail: Text of the end of the prompt, with special tokens.
        tools: Tools of the request, as chat templates read them.
    Raises: RequestError: a tool has no name.
    """
    markers = [marker for marker in format.markers() if marker.strip()]
    markers_by_id = {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and any(token.content in marker for marker in markers)
    }
    return AnswerParser(
        format,
        tools,
        markers_by_id,
        is_in_reasoning(format, prompt_tail),
        starts_in_call=is_in_call(format, prompt_tail),
    )


def is_in_reasoning(format: AnswerFormat, prompt_tail: str) -> bool:
    """Return whether a prompt ends with the marker that opens reasoning."""
    reasoning = format.reasoning
    return reasoning is not None and prompt_tail.rstrip().endswith(reasoning.open.strip())


def is_in_call(format: AnswerFormat, prompt_tail: str) -> bool:
    """Return whether a prompt ends with the marker that is before each call and each text."""
    calls = format.calls
    if calls is None or not calls.text_name:
        return False
    return prompt_tail.rstrip().endswith(calls.open.strip())


_CALLS: dict[str, CallFormat] = {
    format.calls.name: format.calls for format in FORMATS if format.calls is not None
}
_REASONING: dict[str, ReasoningFormat] = {
    format.reasoning.name: format.reasoning for format in FORMATS if format.reasoning is not None
}
_CHANNELS: dict[str, AnswerFormat] = {
    format.channels.name: format for format in FORMATS if format.channels is not None
}
