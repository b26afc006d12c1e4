"""Digests, sizes and times of files with foreign code, to detect that the code changed."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_ALGORITHMS = frozenset({"sha256", "sha384", "sha512"})
_MOST_FILES = 10_000


def digest(files: Iterable[Path]) -> str:
    """Return a digest of the readable files among ``files``; empty if there is none."""
    contents = []
    for file in sorted(files):
        with suppress(OSError):
            contents.append(file.read_bytes())
    return hashlib.sha256(b"\0".join(contents)).hexdigest() if contents else ""


def is_altered(path: Path, recorded: str) -> bool:
    """Tell whether a file is missing or differs from the recorded ``"sha256=..."``.

    The digest is in base64 without padding, as in the RECORD of an installed distribution. Only
    SHA-2 algorithms are accepted; any other counts as altered.
    """
    algorithm, _, expected = recorded.partition("=")
    try:
        if algorithm not in _ALGORITHMS or not path.is_file():
            return True
        with path.open("rb") as file:
            actual_digest = hashlib.file_digest(file, algorithm).digest()
    except (OSError, ValueError):
        return True
    return base64.urlsafe_b64encode(actual_digest).decode().rstrip("=") != expected


def file_facts(root: Path) -> Iterator[list[str | int]]:
    """Yield path, size and modification time of the file ``root``, or of each file in that folder.

    No file is read. Caches and virtual environments are left out. The number of files is limited,
    because metadata may name the root of the disk.
    """
    pending_folders = [str(root)]
    num_remaining = _MOST_FILES
    while pending_folders and num_remaining > 0:
        folder = pending_folders.pop()
        try:
            entries = {entry.name: entry for entry in os.scandir(folder)}
        except NotADirectoryError:
            yield _facts(root.name, root)
            continue
        except OSError:
            continue
        # A virtual environment.
        if "pyvenv.cfg" in entries:
            continue
        for name, entry in sorted(entries.items()):
            if name.startswith(".") or name == "__pycache__":
                continue
            # Links to folders are not followed, because they may form a loop.
            if entry.is_dir(follow_symlinks=False):
                pending_folders.append(entry.path)
            else:
                num_remaining -= 1
                yield _facts(entry.path.removeprefix(str(root)), entry)


def _facts(name: str, file: Path | os.DirEntry[str]) -> list[str | int]:
    try:
        stat = file.stat()
    except OSError:  # a link that leads nowhere
        return [name]
    return [name, stat.st_size, stat.st_mtime_ns]
