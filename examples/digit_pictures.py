"""Pictures of one to three digits, drawn from a seed, to train and to test a small model.

Needs Pillow and numpy only. A picture has a random size, text size, weight, position, dark ink
on a light background, and noise.
"""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

QUESTION = "Which digits?"
SEPARATOR = ", "
"""Stands between the answers for several pictures of one prompt."""
HELD_OUT_SEED = 1 << 40
"""Seeds from here on are never trained on."""
WIDTHS, HEIGHTS, TEXT_SIZES = (48, 96), (28, 48), (20, 36)
_DARK, _LIGHT = 100, 160
_MAX_NOISE = 10.0


def draw_digits(seed: int, size: tuple[int, int] | None = None) -> tuple[Image.Image, str]:
    """Return an RGB picture and its digits; equal arguments give equal pixels.

    Args:
        size: width and height in pixels, random by default.
    """
    chance = random.Random(seed)
    width, height = size or (chance.randint(*WIDTHS), chance.randint(*HEIGHTS))
    digits = "".join(chance.choices("0123456789", k=chance.randint(1, 3)))
    background, ink = _colour(chance, _LIGHT, 255), _colour(chance, 0, _DARK)
    image = Image.new("RGB", (width, height), background)
    draw = ImageDraw.Draw(image)
    stroke = chance.choice((0, 0, 1))
    text_size = chance.randint(*TEXT_SIZES)
    while True:
        font = ImageFont.load_default(text_size)
        left, top, right, bottom = draw.textbbox((0, 0), digits, font=font, stroke_width=stroke)
        spare = int(width - (right - left)), int(height - (bottom - top))
        if min(spare) >= 2:
            break
        text_size -= 1
    x, y = (chance.randint(1, pixels - 1) for pixels in spare)
    draw.text((x - left, y - top), digits, fill=ink, font=font, stroke_width=stroke)
    noise = np.random.default_rng(seed).normal(0, chance.uniform(0, _MAX_NOISE), (height, width, 3))
    pixels = np.asarray(image) + noise
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)), digits


def png(image: Image.Image) -> bytes:
    """Return the picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _colour(chance: random.Random, low: float, high: float) -> tuple[int, int, int]:
    """Return a colour whose luminance is between ``low`` and ``high``."""
    while True:
        red, green, blue = chance.choices(range(256), k=3)
        if low <= 0.3 * red + 0.59 * green + 0.11 * blue <= high:
            return red, green, blue
