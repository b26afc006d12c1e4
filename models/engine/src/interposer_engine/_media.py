"""A picture or a sound of a prompt, as the user gave it."""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from typing import Any, Literal

from interposer.errors import RequestError


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or a sound of a prompt, not decoded yet.

    Attributes:
        kind: ``"image"`` or ``"audio"``.
        content: the bytes of a file, the path of a file, or for an image a ``PIL.Image.Image``.
        place: where the medium stands in the request, such as ``messages[0].content[1]``, for
            errors.
        max_pixels: for an image, the number of pixels above which the image is refused before it is
            decoded; None for the limit of the encoder.
        max_seconds: for a sound, the duration above which the sound is refused before it is
            decoded; None for the limit of the encoder.
    """

    kind: Literal["image", "audio"]
    content: Any
    place: str = ""
    max_pixels: int | None = None
    max_seconds: float | None = None

    @classmethod
    def of_data_address(
        cls, kind: Literal["image", "audio"], address: str, place: str = ""
    ) -> Media:
        """Create a medium from an address such as ``data:image/png;base64,iVBORw...``.

        Raises: RequestError: the address has another form.
        """
        head, _, content = address.partition(",")
        advice = "'data:image/png;base64,' and the base64 of the file"
        if head[:5].lower() == "data:" and head[-7:].lower() == ";base64":
            try:
                return cls(kind, b64decode(content, validate=True), place)
            except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
                reason = f"has base64 that cannot be read: {error}"
                if len(content.split()) > 1:
                    advice = "base64 without line breaks and spaces, such as that of `base64 -w0`"
        else:
            reason = "is no data: address in base64"
        raise RequestError(f"{place or 'The address'} {reason}: {address!r:.60}. Try: {advice}")
