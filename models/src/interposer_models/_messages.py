"""Conversion of chat messages to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from interposer.errors import RequestError

Message = Mapping[str, Any]
"""``role``, ``content`` and further fields that the template reads, such as ``tool_calls``."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EXAMPLE = "Try: [{'role': 'user', 'content': 'Hello'}]"


def plain_messages(messages: Iterable[Message], template: str) -> list[dict[str, Any]]:
    """Convert messages to plain dicts with texts as contents.

    Text parts of a content are joined. The role ``developer``, OpenAI's newer name, becomes
    ``system`` if ``template`` does not name ``developer``.

    Raises: RequestError: there are no messages, a message has no role, or a content is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is of the type {type(messages).__name__}, must be a list of messages. "
            f"{_EXAMPLE}"
        )
    plain = [_plain(index, message) for index, message in enumerate(messages)]
    if not plain:
        raise RequestError(f"messages is empty. {_EXAMPLE}")
    for message in plain:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
    return plain


def check_roles(messages: Iterable[Message], template: str) -> None:
    """Raise RequestError if a role is neither common nor named by the template.

    Many templates would copy an unknown role into the prompt.
    """
    for index, message in enumerate(messages):
        role = message["role"]
        # A template names a role as a quoted text.
        if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise RequestError(
                f"messages[{index}].role is {role!r:.100}, which the chat template does not name. "
                f"Try: {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
            )


def _plain(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"Message {index} is {message!r:.200}, must have a 'role', which is a text. "
            "Try: {'role': 'user', 'content': 'Hello'}"
        )
    content = message.get("content")
    place = f"messages[{index}].content"
    if isinstance(content, list | tuple):
        parts = (_text(f"{place}[{at}]", part) for at, part in enumerate(content))
        return {**message, "content": "".join(parts)}
    if not (content is None or isinstance(content, str)):
        raise RequestError(
            f"{place} is {content!r:.100} of the type {type(content).__name__}; "
            "allowed is a text or a list of text parts. Try: json.dumps(content)"
        )
    return dict(message)


def _text(place: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        kind = f"{part!r:.100}, which is no part"
    elif part.get("type") != "text":
        kind = f"of the type {part.get('type')!r:.100}, which the model cannot read"
    elif isinstance(text := part.get("text"), str):
        return text
    else:
        kind = f"a part whose 'text' is {text!r:.100}, which is no text"
    raise RequestError(
        f"{place} is {kind}; allowed is 'text'. Try: {{'type': 'text', 'text': 'Hello'}}"
    )
