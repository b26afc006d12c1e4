"""Damaged pictures: each is decoded or refused, without a warning, a leak or later harm."""

from __future__ import annotations

import gc
import io
import random
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.image_checkpoints import FAMILIES, picture, write_checkpoint
from PIL import Image

from interposer.errors import RequestError
from interposer_adapt._image_decoding import ImageLimits, decode_image, read_image
from interposer_engine import EmbeddedInput, LanguageModel, Media, load
from interposer_ops.devices import host_memory

pytestmark = pytest.mark.slow

NUM_MUTATIONS = 2000
MAX_PIXELS = 1 << 18
PLACE = "messages[0].content[1]"
# A leak of 1 KiB per picture is 2 MiB, and noise of the allocator is below 1 MiB.
MAX_GROWTH_BYTES = 2 << 20
SAVE_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "PNG": ({}, {"optimize": True}, {"save_all": True, "append_images": [picture(40, 30, 1)]}),
    "JPEG": ({}, {"progressive": True}, {"quality": 30, "subsampling": 0}),
    "GIF": ({}, {"interlace": 1}, {"save_all": True, "append_images": [picture(40, 30, 1)]}),
    "WEBP": (
        {},
        {"lossless": True},
        {"save_all": True, "append_images": [picture(40, 30, 1)]},
    ),
    "BMP": ({}, {"dpi": (300, 300)}),
}
MODES: dict[str, tuple[str, ...]] = {
    "PNG": ("RGB", "RGBA", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "GIF": ("RGB", "L", "P"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "L", "P", "1"),
}


def seeds_of(kind: str) -> list[bytes]:
    """Return files of one format in its variants, with and without Exif metadata."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "A description"
    files = []
    for mode in MODES[kind]:
        for options in SAVE_OPTIONS[kind]:
            if mode == "I;16" and options.get("save_all"):
                continue
            for metadata in ({}, {"exif": exif}) if kind in {"PNG", "JPEG", "WEBP"} else ({},):
                buffer = io.BytesIO()
                source = picture(40, 30, mode="L" if mode == "I;16" else mode).convert(mode)
                source.save(buffer, kind, **options, **metadata)
                files.append(buffer.getvalue())
    return files


def with_checksums(content: bytes) -> bytes:
    """Return a PNG file whose chunks have valid checksums, so that decoders read the chunks."""
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        body = content[at + 4 : at + 8 + length]
        parts.append(struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body)))
        at += 12 + length
    return b"".join([*parts, content[at:]])


def _flip(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _flip_in_header(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(min(64, len(content)))] ^= 1 << chance.randrange(8)


def _extreme_number(content: bytearray, chance: random.Random) -> None:
    layout = chance.choice(("<H", ">H", "<I", ">I"))
    size = struct.calcsize(layout)
    value = chance.choice((0, 1, 255, 256, (1 << (8 * size - 1)) - 1, (1 << (8 * size)) - 1))
    at = chance.randrange(min(len(content) - size, chance.choice((64, 1 << 20))))
    struct.pack_into(layout, content, at, value)


def _cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(1, len(content)) :]


def _remove(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    del content[start : start + chance.randint(1, 32)]


def _insert(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content))
    content[at:at] = chance.randbytes(chance.randint(1, 32))


def _repeat(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    at = chance.randrange(len(content))
    content[at:at] = content[start : start + chance.randint(1, 256)]


def _noise(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    length = min(chance.randint(1, 64), len(content) - start)
    content[start : start + length] = chance.randbytes(length)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _flip_in_header,
    _extreme_number,
    _cut,
    _remove,
    _insert,
    _repeat,
    _noise,
)


def mutations(kind: str, seed: int) -> Iterator[bytes]:
    """Yield damaged files of one format, the same for equal seeds."""
    chance = random.Random(f"{kind} {seed}")
    files = seeds_of(kind)
    for _ in range(NUM_MUTATIONS):
        content = bytearray(chance.choice(files))
        for _ in range(chance.choice((1, 1, 2))):
            chance.choice(DAMAGES)(content, chance)
        damaged = bytes(content)
        yield with_checksums(damaged) if kind == "PNG" and chance.random() < 0.7 else damaged


def check_refusal(error: RequestError) -> None:
    """Check that an error names the place of the picture, and does not repeat the picture."""
    assert str(error).startswith(PLACE)
    assert len(str(error)) < 600


def decoded(content: bytes) -> Image.Image | None:
    """Return the picture, None if it is refused."""
    media = Media("image", content, PLACE, MAX_PIXELS)
    try:
        image: Image.Image = decode_image(read_image(media, ImageLimits()))
    except RequestError as error:
        check_refusal(error)
        return None
    assert image.mode == "RGB"
    assert image.width * image.height <= MAX_PIXELS
    return image


@pytest.mark.parametrize("kind", MODES)
def test_a_damaged_picture_is_decoded_or_refused(kind: str) -> None:
    good = seeds_of(kind)[0]
    expected = decoded(good)
    assert expected is not None
    num_refused = 0
    # Warnings are collected: as errors, they would become refusals.
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        for content in mutations(kind, seed=0):
            num_refused += decoded(content) is None
    assert not [str(warning.message) for warning in caught]
    # Both outcomes are frequent, so the files are damaged neither too little nor too much.
    assert 0.1 * NUM_MUTATIONS < num_refused < 0.95 * NUM_MUTATIONS
    after = decoded(good)
    assert after is not None
    assert after.tobytes() == expected.tobytes()


def resident_bytes() -> int:
    """Return the memory that the process has now, without freed memory of the allocators."""
    gc.collect()
    host_memory.trim()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODES)
def test_damaged_pictures_leave_no_memory_behind(kind: str) -> None:
    files = seeds_of(kind)
    for content in mutations(kind, seed=1):
        decoded(content)
    start = resident_bytes()
    for i in range(NUM_MUTATIONS):
        decoded(files[i % len(files)])
    control = resident_bytes()
    for content in mutations(kind, seed=2):
        decoded(content)
    end = resident_bytes()
    assert end - control <= max(0, control - start) + MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    path = tmp_path_factory.mktemp("qwen2-vl")
    write_checkpoint(FAMILIES["qwen2-vl"], path)
    with load(path, dtype="float32", cache_tokens=512) as model:
        yield model


@pytest.mark.parametrize("kind", MODES)
def test_a_good_request_after_damaged_pictures_works(kind: str, lm: LanguageModel) -> None:
    encoder: Any = lm.input_encoder
    prompt = [1, encoder.token_id, 2]
    good = seeds_of(kind)[0]

    def vectors(content: bytes) -> torch.Tensor:
        tokens = encoder.embed(prompt, [Media("image", content, PLACE, MAX_PIXELS)])
        (run,) = [token for token in tokens if isinstance(token, EmbeddedInput)]
        return run.embeddings

    expected = vectors(good)
    num_encoded = 0
    for content in mutations(kind, seed=3):
        try:
            assert vectors(content).isfinite().all()
            num_encoded += 1
        except RequestError as error:
            check_refusal(error)
    assert num_encoded > 0.05 * NUM_MUTATIONS
    assert vectors(good).equal(expected)
    assert lm.generate([encoder.embed(prompt, [Media("image", good)])], max_new_tokens=2)
