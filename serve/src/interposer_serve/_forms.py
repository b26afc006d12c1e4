"""Reading of multipart forms, in which clients send files."""

from __future__ import annotations

import re
from email.message import Message
from typing import Any

from interposer_serve._errors import ApiError

MEDIA_TYPE = "multipart/form-data"
_MAX_PARTS = 64
_MAX_HEADER_BYTES = 8192
# RFC 2046 limits a boundary to these characters.
_BOUNDARY = re.compile(r"[\w'()+,./:=? -]{1,70}", re.ASCII)


def parse_form(content: bytes, content_type: str) -> dict[str, Any]:
    """Parse the body of a form: the bytes of files and the texts of other fields, by name.

    A name that ends in ``[]`` becomes a list without this end.

    Args:
        content_type: The header of the request, which states the boundary of the parts.
    Raises: ApiError: the body is malformed, a text is not UTF-8, or a field occurs twice.
    """
    boundary = _parameters(content_type)[1].get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise ApiError(400, "The header content-type states no valid boundary of the form's parts")
    delimiter = b"\r\n--" + boundary.encode()
    # The first delimiter may start the body.
    parts = (b"\r\n" + content).split(delimiter, _MAX_PARTS + 1)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        reason = "cut off, or has too many parts" if len(parts) > 1 else "without its boundary"
        raise ApiError(400, f"The body is a form {reason}")
    fields: dict[str, Any] = {}
    for part in parts[1:-1]:
        head, separator, value = part.partition(b"\r\n\r\n")
        if not separator or len(head) > _MAX_HEADER_BYTES:
            raise ApiError(400, "A part of the form has no header, or one that is too long")
        name, is_file = _field(head)
        item = value if is_file else _text(name, value)
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(item)
        elif name in fields:
            raise ApiError(400, f"The form has the field {name!r:.100} twice", param=name[:100])
        else:
            fields[name] = item
    return fields


def _field(head: bytes) -> tuple[str, bool]:
    """Return the name of a part's field, and whether the part is a file."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            kind, parameters = _parameters(value)
            if kind == "form-data" and (name := parameters.get("name")):
                return name, "filename" in parameters
    raise ApiError(400, "A part of the form has no name")


def _parameters(header: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header in lower case, and its parameters."""
    message = Message()
    message["content-type"] = header.replace("\r", "").replace("\n", "")
    pairs = message.get_params([], unquote=True)
    (kind, _), *parameters = pairs or [("", "")]
    return kind.lower(), {name.lower(): value for name, value in parameters}


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError(
            400, f"{name[:100]} is no text in UTF-8. Try: a file name, if it is a file", param=name
        ) from None
