"""Interfaces of the adapters, and the images, texts and sounds that all engines get.

Legend: P patches of an image, H hidden size of the text model.
"""

from __future__ import annotations

import random
import string
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = [
    "MAX_BATCH",
    "MAX_TOKENS",
    "RATE",
    "Answer",
    "ImageEngine",
    "SpeechEngine",
    "picture",
    "sound",
    "text",
]

# Requests at once, and the tokens of a request: the image, the text and the answer.
MAX_BATCH, MAX_TOKENS = 8, 768
RATE = 16000
_TEXT_TOKENS = 20


@dataclass(frozen=True)
class Answer:
    """New tokens of each request, and seconds until the first of them was there.

    Attributes:
        first_s: 0.0 for several requests at once, which have no common first token.
    """

    tokens: list[list[int]]
    first_s: float = 0.0


class ImageEngine(Protocol):
    """A vision-language model that decodes greedily and ignores end-of-sequence tokens."""

    def encode(self, image: bytes) -> Any:
        """Compute the vectors ``[P, H]`` of a PNG file; convertible to a numpy array."""

    def answer(self, images: list[bytes], texts: list[str], new_tokens: int) -> Answer:
        """Run requests of one image and one text each, all at once."""

    def facts(self) -> dict[str, object]:
        """Report version and precision."""


class SpeechEngine(Protocol):
    """A Whisper that decodes one window greedily, in English and without timestamps."""

    def transcribe(self, samples: Any) -> list[int]:
        """Return the text tokens of float32 samples at ``RATE``."""

    def facts(self) -> dict[str, object]:
        """Report version and precision."""


def picture(seed: int, size: int, blocks: int = 7) -> bytes:
    """Write a PNG file of ``size`` times ``size`` pixels, in blocks of random colours.

    No engine crops an image of the size that its model takes. OpenVINO GenAI seems to interpolate
    its pixels nevertheless; an image of one block has the same colour after that.
    """
    colours = np.random.default_rng(seed).integers(0, 256, (blocks, blocks, 3), dtype=np.uint8)
    side = -(-size // blocks)
    pixels = colours.repeat(side, axis=0).repeat(side, axis=1)[:size, :size]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # filter 0 before each row
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def text(seed: int) -> str:
    """Return lower-case letters, each of which is one token."""
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=_TEXT_TOKENS))


def sound(seed: int, seconds: float) -> Any:
    """Return float32 samples at ``RATE``: a tone of another pitch in each second, and noise."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    pitches = generator.uniform(100, 4000, int(seconds) + 1)[times.astype(int)]
    tones = np.sin(2 * np.pi * pitches * times)
    return (0.3 * tones + 0.02 * generator.standard_normal(len(times))).astype(np.float32)
