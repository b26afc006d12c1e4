"""The Python standard library's source as a text corpus, and how well a model compresses it.

Needs numpy only: a model is a callable from token ids to logits and a tokenizer is a callable
from text to token ids, so any runtime and any quantized variant is measured by the same code.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(sysconfig.get_path("stdlib"))
CONTEXT = 1024
STRIDE = 512

# Installed packages are not the standard library, and tests are mostly data.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# Written by the interpreter's build: they name the paths of the machine that built it.
_GENERATED_PREFIXES = ("_sysconfigdata", "config-")


def is_held_out(relative: str) -> bool:
    """Return whether the file at this posix path below the root is never trained on.

    A hash of the path alone decides, so that every Python version and machine agrees.
    """
    return int.from_bytes(hashlib.sha256(relative.encode()).digest(), "big") % 10 == 0


def _files(root: Path, held_out: bool) -> list[Path]:
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_DIRECTORIES.intersection(relative.parts[:-1]):
            continue
        if relative.parts[0].startswith(_GENERATED_PREFIXES) or path.stat().st_size == 0:
            continue
        if is_held_out(relative.as_posix()) == held_out:
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def training_files(root: Path = ROOT) -> list[Path]:
    """Return the non-empty source files to train on, sorted by path: about nine tenths."""
    return _files(root, held_out=False)


def held_out_files(root: Path = ROOT) -> list[Path]:
    """Return the non-empty source files kept for measuring, sorted by path: about a tenth."""
    return _files(root, held_out=True)


def read_text(path: Path) -> str:
    """Return the file's text with its line ends as they are, so that no byte is lost."""
    return path.read_bytes().decode("utf-8")


def _nats(logits: np.ndarray[Any, Any], targets: Sequence[int]) -> float:
    """Return the summed negative log likelihood of one target per row of logits, in nats."""
    logits = logits - logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(targets)), list(targets)]
    losses = np.log(np.exp(logits).sum(axis=1)) - chosen
    return float(losses.sum(dtype=np.float64))


def bits_per_byte(
    logits: Callable[[list[int]], Any],
    encode: Callable[[str], list[int]],
    end_of_text: int,
    files: Iterable[Path],
    context: int = CONTEXT,
    stride: int = STRIDE,
) -> float:
    """Return the model's negative log likelihood of the files, in bits per byte of source.

    `logits` maps n token ids to an array-like of n rows over the vocabulary, row i predicting
    token i + 1; `encode` adds no special tokens. Every file starts from the end-of-text token,
    which is not charged, and must be closed by it, which is: otherwise the code would not say
    where the file ends. Files longer than `context` are scored with a window that moves by
    `stride` tokens, so every later prediction sees at least `context - stride` tokens.
    """
    nats, size = 0.0, 0
    for path in files:
        ids = [end_of_text, *encode(read_text(path)), end_of_text]
        size += path.stat().st_size
        begin = scored = 0
        while scored < len(ids) - 1:
            end = min(begin + context, len(ids) - 1)
            rows = np.asarray(logits(ids[begin:end]), dtype=np.float32)
            nats += _nats(rows[scored - begin :], ids[scored + 1 : end + 1])
            scored, begin = end, end - context + stride
    return nats / math.log(2) / size


def xz_bits_per_byte(files: Iterable[Path], preset: int = 9) -> tuple[float, float]:
    """Return the bits per byte that `xz` needs: each file alone, and all as one stream."""
    contents = [path.read_bytes() for path in files]
    size = sum(map(len, contents))
    alone = sum(len(lzma.compress(content, preset=preset)) for content in contents)
    together = len(lzma.compress(b"".join(contents), preset=preset))
    return alone * 8 / size, together * 8 / size


def primed_xz_bits_per_byte(
    primer: Iterable[Path], files: Iterable[Path], preset: int = 9
) -> float:
    """Return the bits per byte that `xz` adds for the files, once it has seen the primer."""
    before = b"".join(path.read_bytes() for path in primer)
    after = b"".join(path.read_bytes() for path in files)
    both = len(lzma.compress(before + after, preset=preset))
    return (both - len(lzma.compress(before, preset=preset))) * 8 / len(after)
