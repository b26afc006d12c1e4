"""The metadata of what is installed, read without trust in any of it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from interposer_sandbox._content import is_altered
from interposer_sandbox._foreign import described, foreign_errors

# What an installer adds to a wheel: it differs from machine to machine, the code does not.
_ADDED = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
_SCRIPTS = frozenset({"bin", "Scripts"})
_MOST_BYTES = 50_000_000
_ENTRY_POINTS = "entry_points.txt"
_MOST_LETTERS = 100_000


class Metadata(Protocol):
    """The members of a distribution that importlib.metadata finds, or its backport."""

    def read_text(self, filename: str, /) -> str | None:
        """Return the text of a metadata file, or None without one."""

    def locate_file(self, path: str, /) -> object:
        """Return the path of an installed file."""


def metadata_folder(found: Metadata) -> Path:
    """Return the folder of the metadata, whose name is what installers go by."""
    return Path(str(getattr(found, "_path", id(found))))  # which is no public attribute


def metadata_text(found: Metadata, name: str) -> str:
    """Return the text of a metadata file, empty without one or where it cannot be read."""
    try:
        return _text(found, name)
    except (OSError, ValueError):  # not readable, or not UTF-8
        return ""


def _text(found: Metadata, name: str) -> str:
    """Return the text of a metadata file, empty without one.

    Raises:
        OSError: it cannot be read, is no file, or is larger than any such file is.
        UnicodeDecodeError: it is not UTF-8.
    """
    # A pipe would never end, nor would a device.
    if isinstance(getattr(found, "_path", None), Path):
        try:
            stat = (metadata_folder(found) / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return found.read_text(name) or ""  # a name in other letters, or a file as the folder
        if not S_ISREG(stat.st_mode):
            raise OSError("it is no file")
        if stat.st_size > _MOST_BYTES:
            raise OSError(f"it has {stat.st_size:,} bytes; {_MOST_BYTES:,} are allowed")
    return found.read_text(name) or ""


def metadata_headers(text: str) -> list[tuple[str, str]]:
    """Return the headers in lower case with their values; the description is left out.

    The parser for mail takes ten times as long, which counts with a hundred distributions.
    """
    headers: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if not line.strip():
            break
        if line[0] in " \t" and headers:
            key, value = headers.pop()
            headers.append((key, f"{value} {line.strip()}"))
        else:
            key, _, value = line.partition(":")
            headers.append((key.strip().lower(), value.strip()))
    return headers


def entry_points(found: Any, group: str) -> tuple[list[Any], str]:
    """Return the entry points of a group, or none of them and what is wrong with the file."""
    try:
        text = _text(found, _ENTRY_POINTS)
    except OSError as error:
        return [], f"its {_ENTRY_POINTS} cannot be read: {error}"
    except UnicodeDecodeError:
        return [], f"its {_ENTRY_POINTS} is not UTF-8" if _names(found, group) else ""
    if group not in text:
        return [], ""
    if len(text) > _MOST_LETTERS:
        limit = f"{len(text):,} characters; {_MOST_LETTERS:,} are allowed"
        return [], f"its {_ENTRY_POINTS} has {limit}"
    try:
        return list(found.entry_points.select(group=group)), ""
    except foreign_errors() as error:
        return [], f"its {_ENTRY_POINTS} cannot be read: {described(error)}"


def _names(found: Metadata, group: str) -> bool:
    try:
        return group.encode() in (metadata_folder(found) / _ENTRY_POINTS).read_bytes()
    except OSError:
        return False


def editable_folder(found: Metadata) -> Path | None:
    """Return the source folder of an editable installation, or None for any other."""
    text = metadata_text(found, "direct_url.json")
    try:
        origin = json.loads(text) if text else {}
        url = urlsplit(origin["url"]) if origin["dir_info"]["editable"] is True else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if url is None or url.scheme != "file":
        return None
    path = unquote(url.path)
    folder = Path(path[1:] if re.match(r"/[A-Za-z]:", path) else path)
    return folder / "src" if (folder / "src").is_dir() else folder


def recorded_files(record: str) -> Iterator[tuple[str, str]]:
    """Yield path and ``algorithm=digest`` of what a RECORD lists, without what installers add.

    Raises: csv.Error: it cannot be read.
    """
    return (row for row in _rows(record) if not _is_added(row[0]))


def altered_files(record: str, location: Path) -> list[str]:
    """Return the paths in a RECORD whose file is missing, has other content or has no hash.

    What the installer adds is not checked: scripts, cached bytecode and its own notes.

    Args:
        location: the folder that the paths start from.
    """
    return [
        path
        for path, digest in recorded_files(record)
        if (digest or _wants_hash(Path(path))) and is_altered(location / path, digest)
    ]


def has_module(record: str, module: str) -> bool:
    """Say whether the file of ``module`` stands in a RECORD."""
    stem = module.replace(".", "/")
    ends = (path.removeprefix(stem) for path, _ in _rows(record) if path.startswith(stem))
    return any(_ends_a_module(end.removeprefix("/__init__")) for end in ends)


def _rows(record: str) -> Iterator[tuple[str, str]]:
    for row in csv.reader(StringIO(record)):
        if row:
            yield row[0], row[1] if len(row) > 1 else ""


def _is_added(path: str) -> bool:
    parts = path.split("/")
    if parts[0] == "..":  # a script has the path of its interpreter in it
        return len(parts) > 1 and parts[-2] in _SCRIPTS
    return len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _ADDED


def _wants_hash(path: Path) -> bool:
    return path.suffix != ".pyc" and path.parent.suffix != ".dist-info"


def _ends_a_module(suffix: str) -> bool:
    """Say whether ``suffix`` makes the path of a module a file: ``.py``, ``.abi3.so``, ..."""
    native = suffix.startswith(".") and suffix.endswith((".so", ".pyd"))
    return "/" not in suffix and (suffix in (".py", ".pyc") or native)
