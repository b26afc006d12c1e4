"""Conversion of chat messages between OpenAI's format and chat templates."""

from __future__ import annotations

import json
import uuid
from typing import Any

from interposer.errors import RequestError
from interposer_engine import TextTokenizer
from interposer_serve._errors import ApiError


def template_messages(
    messages: list[dict[str, Any]], tokenizer: TextTokenizer
) -> list[dict[str, Any]]:
    """Convert a client's messages for the chat template: text content, parsed call arguments.

    Raises: ApiError: the content has a part that is not text, or arguments are not valid JSON.
    """
    # Templates cannot handle null, which clients send as the content of messages with tool calls.
    filled = [
        {"content": "", **{name: value for name, value in message.items() if value is not None}}
        for message in messages
    ]
    try:
        plain = tokenizer.chat.plain(filled)
    except RequestError as error:
        raise ApiError(400, str(error), param="messages", code="not_honoured") from None
    for index, message in enumerate(plain):
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            path = f"messages[{index}].tool_calls"
            message["tool_calls"] = [_with_parsed_arguments(path, call) for call in calls]
    return plain


def _with_parsed_arguments(path: str, call: Any) -> Any:
    """Parse the arguments of a call, which OpenAI's API sends as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        message = f"{path}: arguments are {function['arguments']!r:.100}; allowed is JSON"
        raise ApiError(400, message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def answer_message(text: str, parsed: dict[str, Any] | None) -> dict[str, Any]:
    """Create the message of the assistant in OpenAI's format.

    Args:
        text: Text of the answer.
        parsed: The answer as parsed by the checkpoint's response template; None without one.
    """
    if parsed is None:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.get("content") or None}
    if parsed.get("thinking"):
        message["reasoning_content"] = parsed["thinking"]
    if calls := parsed.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    else:
        message["content"] = message["content"] or ""
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }
