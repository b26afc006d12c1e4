"""Pictures and sounds in request bodies, in the forms of all APIs.

Attachments leave the body before it is validated: their base64 is no text of the prompt, and counts
for other limits. An ``Attachment`` takes the place of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from interposer_serve._errors import ApiError, shown

Kind = Literal["image", "audio"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attachment:
    """A picture or a sound of a request.

    Attributes:
        kind: "image" or "audio".
        address: A data: address with the content, or an HTTP address.
        place: Where the part stands in the body, such as ``messages[0].content[1]``.
        part: The part of the request.
    """

    kind: Kind
    address: str
    place: str
    part: Mapping[str, Any]

    def __repr__(self) -> str:
        """Describe the kind; the content would be too long for an error message."""
        return f"<{self.kind}>"


@dataclass(frozen=True, slots=True)
class PartType:
    """A type of the parts of a content that is a medium.

    Attributes:
        kind: Kind of the medium.
        address: Returns the address of a part; None for a malformed part.
        example: A part, for errors.
    """

    kind: Kind
    address: Callable[[Mapping[str, Any]], str | None]
    example: str


@dataclass(frozen=True, slots=True)
class AttachmentForm:
    """How an API writes pictures and sounds.

    Attributes:
        field: Name of the field with messages.
        contents: Names of the fields of a message, or of a part, that are lists of parts.
        types: The types of parts, by their names.
        text_types: Names of the types of parts with text, for errors.
    """

    field: str
    contents: tuple[str, ...]
    types: Mapping[str, PartType]
    text_types: tuple[str, ...]

    def attach(
        self,
        messages: object,
        kinds: Collection[str],
        limit: int,
        path: str | None = None,
        advice: str = "",
    ) -> None:
        """Replace each medium of messages by an ``Attachment``.

        Args:
            messages: Value of the field, which is changed; a malformed value is left for the
                validation of the body.
            kinds: Kinds of media that the model takes.
            limit: Number of media in a request.
            path: Name of the messages in errors; None for the name of the field.
            advice: What to do to give the model media of other kinds; may be "".
        Raises: ApiError: a medium is malformed or of a kind that the model does not take, or there
            are too many.
        """
        count = 0
        for parts, index, place in self._parts(path or self.field, messages):
            part = parts[index]
            name = part.get("type")
            if not isinstance(name, str) or (part_type := self.types.get(name)) is None:
                continue
            if part_type.kind not in kinds:
                allowed = " or ".join(map(repr, self._allowed(kinds)))
                message = f"of the type {name!r}, which the model cannot read; allowed is {allowed}"
                end = f". {advice}" if advice else ""
                raise self._error(f"{place} is {message}{end}", "not_honoured")
            address = part_type.address(part)
            if address is None:
                message = f"{place} is {shown(part)}; allowed is {part_type.example}"
                raise self._error(message, "invalid_value")
            count += 1
            if count > limit:
                message = f"{self.field} has more than the allowed {limit} pictures and sounds"
                raise self._error(message, "too_many_items")
            parts[index] = Attachment(part_type.kind, address, place, part)

    def _parts(self, path: str, items: object) -> Iterator[tuple[list[Any], int, str]]:
        """Yield the list, index and place of each JSON object among the parts of messages."""
        for at, item in enumerate(items if isinstance(items, list) else ()):
            for name in self.contents if isinstance(item, dict) else ():
                parts = item.get(name)
                place = f"{path}[{at}].{name}"
                if not isinstance(parts, list):
                    continue
                for index, part in enumerate(parts):
                    if isinstance(part, dict):
                        yield parts, index, f"{place}[{index}]"
                # The results of tools are parts that have parts.
                yield from self._parts(place, parts)

    def _allowed(self, kinds: Collection[str]) -> list[str]:
        media = [name for name, part_type in self.types.items() if part_type.kind in kinds]
        return [*self.text_types, *media]

    def _error(self, message: str, code: str) -> ApiError:
        return ApiError(400, message, param=self.field, code=code)


def original_part(value: object) -> object:
    """Return the part that an ``Attachment`` replaced, for JSON.

    Raises: TypeError: the value is another object.
    """
    if isinstance(value, Attachment):
        return value.part
    raise TypeError(f"{type(value).__name__} is not JSON")


def contents_of(content: str | list[Any]) -> list[Any]:
    """Return a content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def joined_contents(contents: Iterable[str | list[Any]], separator: str) -> str | list[Any]:
    """Join contents, each a text or a list of parts, to one of the same form."""
    items = [*contents]
    if all(isinstance(content, str) for content in items):
        return separator.join(content for content in items if isinstance(content, str))
    parts: list[Any] = []
    for index, content in enumerate(items):
        if index and separator:
            parts.append({"type": "text", "text": separator})
        parts += contents_of(content)
    return parts


def _openai_image(part: Mapping[str, Any]) -> str | None:
    match part.get("image_url"):
        case {"url": str(address)} | str(address):
            return address
    return None


def _openai_audio(part: Mapping[str, Any]) -> str | None:
    match part.get("input_audio"):
        case {"data": str(data), "format": str(_)}:
            return f"data:audio;base64,{data}"
    return None


def _anthropic_image(part: Mapping[str, Any]) -> str | None:
    match part.get("source"):
        case {"type": "base64", "media_type": str(_), "data": str(data)}:
            return f"data:image;base64,{data}"
        case {"type": "url", "url": str(address)}:
            return address
    return None


_AUDIO = PartType(
    "audio",
    _openai_audio,
    "{'type': 'input_audio', 'input_audio': {'data': '...', 'format': 'wav'}}",
)
CHAT_FORM = AttachmentForm(
    "messages",
    ("content",),
    {
        "image_url": PartType(
            "image",
            _openai_image,
            "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}",
        ),
        "input_audio": _AUDIO,
    },
    ("text",),
)
RESPONSES_FORM = AttachmentForm(
    "input",
    ("content", "output"),
    {
        "input_image": PartType(
            "image",
            _openai_image,
            "{'type': 'input_image', 'image_url': 'data:image/png;base64,...'}",
        ),
        "input_audio": _AUDIO,
    },
    ("input_text", "output_text"),
)
MESSAGES_FORM = AttachmentForm(
    "messages",
    ("content",),
    {
        "image": PartType(
            "image",
            _anthropic_image,
            "{'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', "
            "'data': '...'}}",
        )
    },
    ("text", "tool_use", "tool_result", "thinking"),
)


def _object(kind: str, **properties: Any) -> dict[str, Any]:
    fields = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": [*fields], "properties": fields}


_TEXT = {"type": "string"}
_URL = {"type": "object", "required": ["url"], "properties": {"url": _TEXT}}
_SOUND = {
    "type": "object",
    "required": ["data", "format"],
    "properties": {"data": {"type": "string", "contentEncoding": "base64"}, "format": _TEXT},
}
_SOURCES = [
    _object("base64", media_type=_TEXT, data={"type": "string", "contentEncoding": "base64"}),
    _object("url", url=_TEXT),
]
CHAT_SCHEMAS = [
    _object("image_url", image_url=_URL),
    _object("input_audio", input_audio=_SOUND),
]
RESPONSES_SCHEMAS = [
    _object("input_image", image_url=_TEXT),
    _object("input_audio", input_audio=_SOUND),
]
MESSAGES_SCHEMAS = [_object("image", source={"anyOf": _SOURCES})]
"""JSON schemas of the parts of each API, for the OpenAPI document."""
