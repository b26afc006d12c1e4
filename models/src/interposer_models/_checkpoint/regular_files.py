"""Checks that model and adapter files are regular files, before any is opened."""

from __future__ import annotations

from pathlib import Path

from interposer.errors import CheckpointError
from interposer.tooling import irregular

_READ = frozenset(
    {".bpe", ".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
)


def check_regular(path: Path) -> None:
    """Refuse a FIFO, a device, a folder or a link loop; a missing file passes.

    Raises: CheckpointError: ``path`` is not a regular file; the text names the kind.
    """
    if fault := irregular(path):
        raise CheckpointError(path, fault, "put the file there, or remove it")


def check_folder(folder: Path) -> None:
    """Refuse a folder in which a model or adapter file is not a regular file.

    Raises: CheckpointError: with the first such path.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return  # opening a file of the folder raises a more precise error
    for path in paths:
        if path.suffix.lower() in _READ:
            check_regular(path)
