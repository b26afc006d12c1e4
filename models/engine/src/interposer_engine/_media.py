"""A picture or a sound of a prompt, as the user gave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or a sound of a prompt, not decoded yet.

    Attributes:
        kind: ``"image"`` or ``"audio"``.
        content: the bytes of a file, the path of a file, or for an image a ``PIL.Image.Image``.
        place: where the medium stands in the request, such as ``messages[0].content[1]``, for
            errors.
    """

    kind: Literal["image", "audio"]
    content: Any
    place: str = ""
