"""A checkpoint that takes pictures and sounds, and the encoder of its media.

The encoder is real but tiny: each row of a picture becomes a token, whose vector follows from the
mean colour of the row. Pictures are PPM files, which need no decoder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from interposer.errors import RequestError
from interposer_engine import EmbeddedInput, Media

__all__ = ["ColourEncoder", "picture", "sound", "write_media_model", "write_provider"]

STDLIB = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
PLACEHOLDERS = ("<image>", "<audio>")
# As templates of vision models: text that is no part of a list is written, too.
TEMPLATE = """\
{%- for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}{{ "<" ~ part.type ~ ">" }}{% endif %}
{%- endfor %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""
_HEADER = re.compile(rb"P6 (\d+) (\d+) 255\n")


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PPM file with random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return b"P6 %d %d 255\n" % (width, height) + pixels.numpy().tobytes()


def sound(seed: int = 0) -> bytes:
    """Return the bytes of a sound, which becomes two tokens."""
    return b"RIFF" + bytes([seed] * 8)


def write_media_model(folder: Path) -> Path:
    """Write the shipped model with placeholders for pictures and sounds."""
    shutil.copytree(STDLIB, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in PLACEHOLDERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vision_config": {"model_type": "colours"}, "audio_config": {"model_type": "bytes"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_provider(folder: Path) -> Path:
    """Write the metadata of a distribution whose entry point loads ``ColourEncoder``.

    Returns: the folder, for ``sys.path``.
    """
    info = folder / "acme_colours-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: interposer-colours\nVersion: 1.0\n"
    )
    points = f"[interposer.input_encoders]\na-colours = {__name__}:provide\n"
    (info / "entry_points.txt").write_text(points)
    return folder


def provide(checkpoint: Any, _plan: Any) -> ColourEncoder | None:
    """Load the encoder of a checkpoint that ``write_media_model`` wrote."""
    has_colours = checkpoint.config.get("vision_config", {}).get("model_type") == "colours"
    return ColourEncoder(checkpoint.path) if has_colours else None


class ColourEncoder:
    """Encodes pictures by the colours of their rows, and sounds by their bytes."""

    kinds = frozenset({"image", "audio"})
    max_step_tokens = 0

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._kinds = {tokenizer.token_to_id(text): text[1:-1] for text in PLACEHOLDERS}
        size = json.loads((folder / "config.json").read_text())["hidden_size"]
        self._weights = torch.randn(3, size, generator=torch.Generator().manual_seed(1))

    def embed(
        self, token_ids: Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        """Put the vectors of media in place of the placeholders."""
        places = [self._kinds[token] for token in token_ids if token in self._kinds]
        if places != [medium.kind for medium in media]:
            raise RequestError(f"The prompt has the placeholders {places}, unlike its media")
        runs = iter([self._encoded(medium) for medium in media])
        return [next(runs) if token in self._kinds else token for token in token_ids]

    def _encoded(self, medium: Media) -> EmbeddedInput:
        content = medium.content
        if isinstance(content, Path):
            content = content.read_bytes()
        if medium.kind == "audio":
            values = torch.tensor([*content[-6:]], dtype=torch.float32).reshape(2, 3)
        else:
            values = self._rows(content, medium)
        digest = blake2b(medium.kind.encode() + content).digest()
        return EmbeddedInput(medium.kind, digest, values / 255 @ self._weights)

    def _rows(self, content: Any, medium: Media) -> torch.Tensor:
        """Return the mean colours of the rows of a picture."""
        match = _HEADER.match(content)
        if match is None:
            raise RequestError(f"{medium.place} is no picture. Try: a PPM file")
        width, height = int(match[1]), int(match[2])
        if medium.max_pixels is not None and width * height > medium.max_pixels:
            raise RequestError(
                f"{medium.place} has {width} x {height} pixels; allowed are {medium.max_pixels}"
            )
        pixels = content[match.end() :]
        if len(pixels) != width * height * 3:
            raise RequestError(f"{medium.place} is cut off. Try: a whole file")
        return torch.tensor([*pixels], dtype=torch.float32).reshape(height, width, 3).mean(1)
