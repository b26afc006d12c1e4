"""Decoding of pictures that clients send: transformers' pixels, and refusals of hostile files."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.adapt.tests.image_checkpoints import picture
from PIL import Image
from transformers.image_utils import load_image

from interposer.errors import RequestError
from interposer_adapt._image_decoding import ImageLimits, decode_image, read_image
from interposer_engine import Media

LIMITS = ImageLimits()
PLACE = "messages[0].content[1]"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(
    content: Any, limits: ImageLimits = LIMITS, max_pixels: int | None = None
) -> Image.Image:
    media = Media("image", content, PLACE, max_pixels)
    image: Image.Image = decode_image(read_image(media, limits))
    return image


def _deep() -> Image.Image:
    return Image.fromarray((np.arange(40 * 30).reshape(30, 40) * 50).astype("uint16"))


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(40, 30), "JPEG", exif=exif)


def _transparent_palette() -> bytes:
    image = picture(40, 30).quantize(16)
    return encoded(image, "PNG", transparency=bytes(range(16)))


READABLE: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(picture(40, 30), "JPEG"),
    "jpeg-rotated": _rotated,
    "jpeg-cmyk": lambda: encoded(picture(40, 30, mode="CMYK"), "JPEG"),
    "jpeg-gray": lambda: encoded(picture(40, 30, mode="L"), "JPEG"),
    "png": lambda: encoded(picture(40, 30), "PNG"),
    "png-alpha": lambda: encoded(picture(40, 30, mode="RGBA"), "PNG"),
    "png-gray-alpha": lambda: encoded(picture(40, 30, mode="LA"), "PNG"),
    "png-palette": lambda: encoded(picture(40, 30).quantize(16), "PNG"),
    "png-bits": lambda: encoded(picture(40, 30, mode="1"), "PNG"),
    "png-16-bits": lambda: encoded(_deep(), "PNG"),
    "webp": lambda: encoded(picture(40, 30, mode="RGBA"), "WEBP"),
    "bmp": lambda: encoded(picture(40, 30), "BMP"),
    "gif-animated": lambda: encoded(
        picture(40, 30), "GIF", save_all=True, append_images=[picture(40, 30, 1)]
    ),
    "webp-animated": lambda: encoded(
        picture(40, 30), "WEBP", save_all=True, append_images=[picture(40, 30, 1)]
    ),
    "png-animated": lambda: encoded(
        picture(40, 30), "PNG", save_all=True, append_images=[picture(40, 30, 1)]
    ),
}


@pytest.mark.parametrize("kind", READABLE)
def test_pixels_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    content = READABLE[kind]()
    path = tmp_path / "picture"
    path.write_bytes(content)
    expected = load_image(Image.open(io.BytesIO(content)))
    for source in (content, path, Image.open(io.BytesIO(content))):
        actual = decoded(source)
        assert actual.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_transparent_palettes_lose_their_transparency() -> None:
    content = _transparent_palette()
    expected = Image.open(io.BytesIO(content)).convert("RGBA").convert("RGB")
    np.testing.assert_array_equal(np.asarray(decoded(content)), np.asarray(expected))


def _png(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _gif(width: int, height: int) -> bytes:
    content = bytearray(encoded(picture(40, 30), "GIF"))
    content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


def _jpeg(width: int, height: int) -> bytes:
    content = bytearray(encoded(picture(40, 30), "JPEG"))
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def _eps() -> bytes:
    return encoded(picture(40, 30), "EPS")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: b"", "is an empty file, of 0 bytes. Try: a complete file"),
    "text": (lambda: b"<html><body>Not found</body></html>", "not a readable picture"),
    "zeros": (lambda: bytes(1000), "not a readable picture"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable picture"),
    "eps, which runs a program": (_eps, "one of the formats BMP, GIF"),
    "png header alone": (
        lambda: READABLE["png"]()[:40],
        "not a readable picture|cannot be decoded",
    ),
    "half a png": (lambda: _half("png"), "cannot be decoded"),
    "half a jpeg": (lambda: _half("jpeg"), "not a readable picture|cannot be decoded"),
    "half a gif": (lambda: _half("gif-animated"), "cannot be decoded"),
    "half a webp": (lambda: _half("webp"), "not a readable picture|cannot be decoded"),
    "half a bmp": (lambda: _half("bmp"), "cannot be decoded"),
    "png of no width": (lambda: _png(0, 10), "not a readable picture|empty"),
    "jpeg of no height": (lambda: _jpeg(10, 0), "not a readable picture|empty|cannot be decoded"),
    "bomb that Pillow tolerates": (lambda: _png(10_000, 8_000), "10000 x 8000 pixels; at most"),
    "bomb that Pillow warns of": (lambda: _png(10_000, 10_000), "too many pixels"),
    "bomb that Pillow refuses": (lambda: _png(60_000, 60_000), "too many pixels"),
    "bomb of 2**62 pixels": (lambda: _png(2**31 - 1, 2**31 - 1), "too many pixels"),
    "gif of 4 gigapixels": (lambda: _gif(65_535, 65_535), "too many pixels"),
    "jpeg of 4 gigapixels": (lambda: _jpeg(65_000, 65_000), "too many pixels"),
    "strip": (lambda: encoded(Image.new("L", (1, 201)), "PNG"), "1 x 201 pixels"),
    "bytes beyond the limit": (lambda: bytes(LIMITS.file_bytes + 1), "at most 33554432"),
    "missing file": (lambda: Path("/nowhere/picture.png"), "does not exist"),
    "folder": (lambda: Path("/"), "is not a file"),
    "endless device": (lambda: Path("/dev/zero"), "is not a file"),
    "address": (lambda: "https://example.org/picture.png", "of the type str"),
}


def _half(kind: str) -> bytes:
    content = READABLE[kind]()
    return content[: len(content) // 2]


@pytest.mark.parametrize("kind", REFUSED)
def test_hostile_files_are_refused_by_place(kind: str) -> None:
    content, reason = REFUSED[kind]
    with pytest.raises(RequestError, match=reason) as refusal:
        decoded(content())
    assert str(refusal.value).startswith(PLACE)
    assert len(str(refusal.value)) < 600
    assert " object at 0x" not in str(refusal.value)
    assert "Try: " in str(refusal.value)


@pytest.mark.parametrize("kind", ["bomb that Pillow tolerates", "bomb that Pillow refuses"])
def test_a_bomb_is_refused_before_its_pixels_take_memory(kind: str) -> None:
    content = REFUSED[kind][0]()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            decoded(content)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_limits_of_a_caller_apply() -> None:
    limits = ImageLimits(file_bytes=5_000, pixels=1_000)
    decoded(encoded(picture(40, 25), "JPEG"), limits)
    for content in (encoded(picture(40, 26), "JPEG"), picture(40, 26)):
        with pytest.raises(RequestError, match="at most 1000"):
            decoded(content, limits)
    with pytest.raises(RequestError, match="at most 5000"):
        decoded(encoded(picture(90, 90), "BMP"), limits)


def test_the_limit_of_a_medium_replaces_that_of_the_encoder() -> None:
    content = encoded(picture(40, 25), "JPEG")
    decoded(content, ImageLimits(pixels=999), max_pixels=1_000)
    with pytest.raises(RequestError, match="at most 999"):
        decoded(content, max_pixels=999)
