"""Messages as chat templates read them, and answers as clients do."""

from __future__ import annotations

import json
import uuid
from typing import Any

from interposer.errors import RequestError
from interposer_models import TextTokenizer
from interposer_serve._errors import ApiError


def written(messages: list[dict[str, Any]], tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, and whose calls have their arguments as objects.

    Raises: ApiError: a content has a part that is no text, or arguments are no JSON.
    """
    # Templates know no null: a message of calls alone has an empty content.
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
            place = f"messages[{index}].tool_calls"
            message["tool_calls"] = [_with_objects(place, call) for call in calls]
    return plain


def _with_objects(place: str, call: Any) -> Any:
    """Return a call whose arguments are no longer the JSON text that OpenAI's interface has."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        message = f"{place}: arguments are {function['arguments']!r:.100}; allowed is JSON"
        raise ApiError(400, message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def answer_message(text: str, parsed: dict[str, Any] | None) -> dict[str, Any]:
    """Return the message of the assistant.

    Args:
        text: the answer as it is.
        parsed: the same by the response template of the checkpoint, if it has one.
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
