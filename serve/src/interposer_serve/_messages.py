"""Messages as chat templates read them, and answers as clients do."""

from __future__ import annotations

import json
import uuid
from typing import Any

from interposer_serve._errors import ApiError


def written(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, and whose calls have their arguments as objects.

    Raises: ApiError: a content has a part that is no text, or arguments are no JSON.
    """
    return [_written(index, message) for index, message in enumerate(messages)]


def _written(index: int, message: dict[str, Any]) -> dict[str, Any]:
    place = f"messages[{index}]"
    told = {name: value for name, value in message.items() if value is not None}
    # OpenAI's newer name, which templates do not know.
    if told.get("role") == "developer":
        told["role"] = "system"
    content = told.get("content", "")
    if isinstance(content, list):
        content = "".join(_text(f"{place}.content[{at}]", part) for at, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(
            400,
            f"{place}.content is {content!r:.100}; allowed is a text or a list of text parts",
            param="messages",
        )
    told["content"] = content
    calls = told.get("tool_calls")
    if isinstance(calls, list):
        told["tool_calls"] = [_with_objects(f"{place}.tool_calls", call) for call in calls]
    return told


def _text(place: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ApiError(
        400,
        f"{place} is of the type {kind!r:.100}, which the model cannot read; allowed is 'text'",
        param="messages",
        code="not_honoured",
    )


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
