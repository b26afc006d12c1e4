"""The check that files of a model or an adapter are regular ones, before any of them is opened."""

from __future__ import annotations

from pathlib import Path

from interposer.errors import CheckpointError
from interposer.tooling import irregular

_READ = frozenset(
    {".bpe", ".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
)


def check_regular(path: Path) -> None:
    """Refuse a path that leads to a FIFO, a device, a folder or to itself; a missing one is none.

    Raises: CheckpointError: with what it is.
    """
    if fault := irregular(path):
        raise CheckpointError(path, fault, "put the file there, or remove it")


def check_folder(folder: Path) -> None:
    """Refuse a folder that has anything else where a model or an adapter has its files.

    Raises: CheckpointError: with the first such path.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return  # whoever opens a file says it better
    for path in paths:
        if path.suffix.lower() in _READ:
            check_regular(path)
