"""Parts of the content of a chat message: texts, pictures and sounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from interposer.errors import RequestError
from interposer_engine._media import Media

Kind = Literal["image", "audio"]

_OPENAI_KINDS: Mapping[str, Kind] = {"image_url": "image", "input_audio": "audio"}
# The types of transformers and of OpenAI's API.
_KINDS: Mapping[str, Kind] = {"image": "image", "audio": "audio", **_OPENAI_KINDS}
_EXAMPLES = {
    "image": "{'type': 'image', 'image': Path('cat.png')}",
    "image_url": "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}",
    "audio": "{'type': 'audio', 'audio': Path('word.wav')}",
    "input_audio": "{'type': 'input_audio', 'input_audio': {'data': '...', 'format': 'wav'}}",
}


def with_media(
    messages: Iterable[Mapping[str, Any]], kinds: Collection[str], advice: str = ""
) -> list[Mapping[str, Any]]:
    """Return messages in which ``Media`` replace the mappings that describe media.

    A mapping can name a file, which is opened when the medium is decoded. So call this only with
    messages of the program's own user, and never with those of a client.

    Args:
        messages: Chat messages; malformed messages and parts of other types stay unchanged.
        kinds: Kinds of media that the model takes.
        advice: What to do in place of a medium of another kind; "" for a text.
    Raises: RequestError: a part is malformed, or of a kind that the model does not take.
    """
    converted: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [
                _with_media(f"messages[{index}].content[{at}]", part, kinds, advice)
                for at, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        converted.append(message)
    return converted


def _with_media(place: str, part: Any, kinds: Collection[str], advice: str) -> Any:
    name = part.get("type") if isinstance(part, Mapping) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return part
    if kind not in kinds:
        reason = f"of the type {name!r}, which the model cannot read"
        raise _refused(place, reason, _KINDS, kinds, advice)
    return _medium(place, kind, part)


def read_part(place: str, part: Any, kinds: Collection[str]) -> str | Media:
    """Return a part: the text of a mapping, or a ``Media``.

    Args:
        place: Where the part stands, such as ``messages[0].content[1]``, for errors.
        kinds: Kinds of media that the model takes.
    Raises: RequestError: the part is malformed, or of a kind that the model does not take.
    """
    if isinstance(part, Media):
        if part.kind in kinds:
            return replace(part, place=part.place or place)
        reason = f"of the kind {part.kind!r}, which the model cannot read"
    elif not isinstance(part, Mapping):
        reason = f"{part!r:.100}, which is no part"
    elif part.get("type") != "text":
        reason = f"of the type {part.get('type')!r:.100}, which the model cannot read"
    elif isinstance(text := part.get("text"), str):
        return text
    else:
        reason = f"a part whose 'text' is {text!r:.100}, which is no text"
    raise _refused(place, reason, _OPENAI_KINDS, kinds)


def _medium(place: str, kind: Kind, part: Mapping[str, Any]) -> Media:
    match part:
        case {"type": "image_url", "image_url": {"url": str(address)} | str(address)}:
            return Media.of_data_address(kind, address, place)
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return Media.of_data_address(kind, f"data:audio;base64,{data}", place)
        case {"type": "image", "image": content} | {"type": "audio", "audio": content}:
            if isinstance(content, str) and content[:5].lower() == "data:":
                return Media.of_data_address(kind, content, place)
            if isinstance(content, str) and "://" in content[:16]:
                raise RequestError(
                    f"{place} has the address {content!r:.100}, which is not fetched here. "
                    f"Try: fetch it, and give its bytes: {{'type': {kind!r}, {kind!r}: ...}}"
                )
            return Media(kind, Path(content) if isinstance(content, str) else content, place)
    name = part["type"]
    raise RequestError(f"{place} is a malformed part of the type {name!r}. Try: {_EXAMPLES[name]}")


def _refused(
    place: str, reason: str, types: Mapping[str, Kind], kinds: Collection[str], advice: str = ""
) -> RequestError:
    names = [repr(name) for name in ("text", *(name for name in types if types[name] in kinds))]
    allowed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    advice = advice or "Try: {'type': 'text', 'text': 'Hello'}"
    return RequestError(f"{place} is {reason}; allowed is {allowed}. {advice}")
