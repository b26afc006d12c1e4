"""The content of foreign code: what tells one state of its files from another."""

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
    """Return a digest of the readable ones of ``files``, in any order; empty if there is none."""
    contents = []
    for file in sorted(files):
        with suppress(OSError):
            contents.append(file.read_bytes())
    return hashlib.sha256(b"\0".join(contents)).hexdigest() if contents else ""


def is_altered(path: Path, recorded: str) -> bool:
    """Say whether a file is missing or has another content than ``"sha256=..."`` records.

    The digest is written in base64 without padding, as in RECORD of an installed distribution. Of
    other algorithms than SHA-2 none is believed.
    """
    algorithm, _, expected = recorded.partition("=")
    try:
        if algorithm not in _ALGORITHMS or not path.is_file():
            return True
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).digest()
    except (OSError, ValueError):
        return True
    return base64.urlsafe_b64encode(found).decode().rstrip("=") != expected


def file_facts(root: Path) -> Iterator[list[str | int]]:
    """Yield path, size and time of ``root`` or the files below it, none of which is read.

    Caches and environments are left out, and so is what goes beyond any plugin's number of files:
    a folder that metadata names may be the whole disk.
    """
    waiting = [str(root)]
    left = _MOST_FILES
    while waiting and left > 0:
        here = waiting.pop()
        try:
            entries = {entry.name: entry for entry in os.scandir(here)}
        except NotADirectoryError:
            yield _facts(root.name, root)
            continue
        except OSError:
            continue
        if "pyvenv.cfg" in entries:
            continue
        for name, entry in sorted(entries.items()):
            if name.startswith(".") or name == "__pycache__":
                continue
            # A link to a folder is not followed: it may lead back here.
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            else:
                left -= 1
                yield _facts(entry.path.removeprefix(str(root)), entry)


def _facts(name: str, file: Path | os.DirEntry[str]) -> list[str | int]:
    try:
        stat = file.stat()
    except OSError:  # a link that leads nowhere
        return [name]
    return [name, stat.st_size, stat.st_mtime_ns]
