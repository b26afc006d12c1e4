"""Decoding of untrusted pictures: every limit is checked before a pixel is decoded.

Pixels are those of ``transformers.image_utils.load_image``: upright by the EXIF orientation, RGB,
and the first frame of an animation.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from typing import Any

from interposer.errors import RequestError, described, foreign_errors
from interposer_adapt._media_files import read_bytes
from interposer_engine import Media

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Formats of Pillow that are decoded. Other decoders, such as EPS, run programs or are rarely
tested with hostile files."""
_MODULES_OF_PILLOW = re.compile(r"PIL\.")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the pictures of one prompt.

    Attributes:
        images: number of pictures.
        file_bytes: size of a file.
        pixels: width times height.
        aspect_ratio: longer by shorter side. Image processors scale the shorter side of a picture
            to a fixed length, so a long strip would become enormous.
    """

    images: int = 64
    file_bytes: int = 32 << 20
    pixels: int = 64 << 20
    aspect_ratio: int = 200


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A picture whose content is in memory, but not decoded.

    Attributes:
        place: name of the picture in errors.
        content: bytes of a file, or a picture of Pillow.
        digest: hash of the content; equal contents have equal pixels.
        limits: limits that apply to the picture.
    """

    place: str
    content: Any
    digest: bytes
    limits: ImageLimits


def read_image(media: Media, limits: ImageLimits) -> ImageSource:
    """Read the content of a picture, and hash it.

    Args:
        limits: limits on pictures; ``media.max_pixels`` replaces the number of pixels.
    Raises: RequestError: the content is of another type, cannot be read, or exceeds a limit.
    """
    from PIL import Image

    _ignore_warnings()
    place = media.place or "The image"
    if media.max_pixels is not None:
        limits = replace(limits, pixels=media.max_pixels)
    content = media.content
    if isinstance(content, Image.Image):
        pixels = _upright(content, place, limits)
        size = f"{pixels.size}".encode()
        return ImageSource(place, pixels, blake2b(size + pixels.tobytes()).digest(), limits)
    content = read_bytes(
        content,
        place,
        limits.file_bytes,
        types="the bytes of a file, a Path or a PIL.Image.Image",
        advice="a smaller picture, or JPEG",
    )
    return ImageSource(place, content, blake2b(content).digest(), limits)


def decode_image(source: ImageSource) -> Any:
    """Return the picture as an upright RGB ``PIL.Image.Image``.

    Raises: RequestError: the file is damaged, of another format, or exceeds a limit.
    """
    from PIL import Image

    if isinstance(source.content, Image.Image):
        return source.content
    if not source.content:
        raise RequestError(f"{source.place} is an empty file, of 0 bytes. Try: a complete file")
    try:
        # Reads the header only.
        image = Image.open(BytesIO(source.content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_large(source.place, str(error), source.limits) from error
    except foreign_errors() as error:
        raise RequestError(
            f"{source.place} is not a readable picture: {_reason(error)}. "
            f"Try: a complete file in one of the formats {', '.join(FORMATS)}"
        ) from error
    return _upright(image, source.place, source.limits)


def _ignore_warnings() -> None:
    """Ignore the warnings of Pillow in this process, such as those of damaged metadata.

    Python would keep the text of each warning, which a client can make different each time. A
    filter for one call is not possible: threads share the filters.
    """
    rule = ("ignore", None, Warning, _MODULES_OF_PILLOW, 0)
    if rule not in warnings.filters:
        warnings.filterwarnings("ignore", module=_MODULES_OF_PILLOW.pattern)


def _upright(image: Any, place: str, limits: ImageLimits) -> Any:
    """Decode the pixels, after the size was checked."""
    from PIL import ImageOps

    width, height = image.size
    if width < 1 or height < 1:
        raise RequestError(
            f"{place} is empty: {width} x {height} pixels. Try: a picture of at least 1 x 1 pixels"
        )
    if width * height > limits.pixels:
        raise _too_large(place, f"{width} x {height} pixels", limits)
    if max(width, height) > limits.aspect_ratio * min(width, height):
        raise RequestError(
            f"{place} is {width} x {height} pixels, a side may be at most {limits.aspect_ratio} "
            "times as long as the other. Try: cut the picture"
        )
    try:
        image = ImageOps.exif_transpose(image)
        return image.convert("RGB")
    except foreign_errors() as error:
        raise RequestError(
            f"{place} cannot be decoded: {_reason(error)}. Try: save the picture again, as PNG"
        ) from error


def _too_large(place: str, size: str, limits: ImageLimits) -> RequestError:
    return RequestError(
        f"{place} has too many pixels: {size}; at most {limits.pixels} are accepted. "
        "Try: a smaller picture"
    )


def _reason(error: BaseException) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        # The text of Pillow names an object of Python instead of the file.
        return "it starts as none of the readable formats, or its header is damaged"
    # The texts of Pillow may contain the repr of the whole input.
    return described(error)[:200]
