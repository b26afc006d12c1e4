"""Readers for the metadata of installed distributions, which may be malformed."""

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

# Files that an installer adds to a wheel. They differ between machines, unlike the code.
_ADDED = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
_SCRIPTS = frozenset({"bin", "Scripts"})
# A larger file is no plausible metadata, and reading it would fill the memory.
_MOST_BYTES = 50_000_000
_ENTRY_POINTS = "entry_points.txt"
_MOST_LETTERS = 100_000


class Metadata(Protocol):
    """The required members of a distribution object of importlib.metadata or the backport."""

    def read_text(self, filename: str, /) -> str | None:
        """Return the text of a metadata file, or None without one."""

    def locate_file(self, path: str, /) -> object:
        """Return the path of an installed file."""


def metadata_folder(distribution: Metadata) -> Path:
    """Return the metadata folder; installers identify a distribution by the folder's name."""
    # _path is not public, but has no substitute.
    return Path(str(getattr(distribution, "_path", id(distribution))))


def metadata_text(distribution: Metadata, name: str) -> str:
    """Return the text of a metadata file; empty if the file is missing or unreadable."""
    try:
        return _text(distribution, name)
    except (OSError, ValueError):  # not readable, or not UTF-8
        return ""


def _text(metadata: Metadata, name: str) -> str:
    """Return the text of a metadata file; empty if the file is missing.

    Raises:
        OSError: the file cannot be read, is not regular, or is implausibly large.
        UnicodeDecodeError: the file is not UTF-8.
    """
    # Reading a pipe or a device might never end.
    # Other implementations, such as zip files, have no file to check.
    if isinstance(getattr(metadata, "_path", None), Path):
        try:
            stat = (metadata_folder(metadata) / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return metadata.read_text(name) or ""  # a differently spelled name, or an egg file
        if not S_ISREG(stat.st_mode):
            raise OSError("it is no file")
        if stat.st_size > _MOST_BYTES:
            raise OSError(f"it has {stat.st_size:,} bytes; {_MOST_BYTES:,} are allowed")
    return metadata.read_text(name) or ""


def metadata_headers(text: str) -> list[tuple[str, str]]:
    """Return (lower-case name, value) of each header in a METADATA text, without the description.

    Python's mail parser takes ten times as long, which matters with a hundred distributions.
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


def entry_points(distribution: Any, group: str) -> tuple[list[Any], str]:
    """Return the entry points of a group and ""; for a faulty file, an empty list and the fault."""
    try:
        text = _text(distribution, _ENTRY_POINTS)
    except OSError as error:
        return [], f"its {_ENTRY_POINTS} cannot be read: {error}"
    except UnicodeDecodeError:
        return [], f"its {_ENTRY_POINTS} is not UTF-8" if _mentions_group(
            distribution, group
        ) else ""
    if group not in text:
        return [], ""
    if len(text) > _MOST_LETTERS:
        limit = f"{len(text):,} characters; {_MOST_LETTERS:,} are allowed"
        return [], f"its {_ENTRY_POINTS} has {limit}"
    try:
        return list(distribution.entry_points.select(group=group)), ""
    except foreign_errors() as error:
        return [], f"its {_ENTRY_POINTS} cannot be read: {described(error)}"


def _mentions_group(metadata: Metadata, group: str) -> bool:
    try:
        return group.encode() in (metadata_folder(metadata) / _ENTRY_POINTS).read_bytes()
    except OSError:
        return False


def editable_folder(distribution: Metadata) -> Path | None:
    """Return the source folder of an editable installation; None for any other kind."""
    text = metadata_text(distribution, "direct_url.json")
    try:
        origin = json.loads(text) if text else {}
        url = urlsplit(origin["url"]) if origin["dir_info"]["editable"] is True else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if url is None or url.scheme != "file":
        return None
    path = unquote(url.path)
    # A URL of a Windows path has a slash before the drive letter.
    folder = Path(path[1:] if re.match(r"/[A-Za-z]:", path) else path)
    return folder / "src" if (folder / "src").is_dir() else folder


def recorded_files(record: str) -> Iterator[tuple[str, str]]:
    """Yield path and ``algorithm=digest`` of the code files that a RECORD lists.

    Files that the installer adds differ between machines and are left out.

    Raises: csv.Error: the text cannot be parsed.
    """
    return (row for row in _rows(record) if not _is_added(row[0]))


def altered_files(record: str, location: Path) -> list[str]:
    """Return the paths in a RECORD whose file is missing, changed or listed without a hash.

    Files that the installer adds are not checked: scripts, cached bytecode and notes.

    Args:
        location: the base folder of the paths.
    """
    return [
        path
        for path, digest in recorded_files(record)
        if (digest or _needs_hash(Path(path))) and is_altered(location / path, digest)
    ]


def has_module(record: str, module: str) -> bool:
    """Tell whether a RECORD lists the file of ``module``."""
    stem = module.replace(".", "/")
    ends = (path.removeprefix(stem) for path, _ in _rows(record) if path.startswith(stem))
    return any(_is_module_suffix(end.removeprefix("/__init__")) for end in ends)


def _rows(record: str) -> Iterator[tuple[str, str]]:
    for row in csv.reader(StringIO(record)):
        if row:
            yield row[0], row[1] if len(row) > 1 else ""


def _is_added(path: str) -> bool:
    parts = path.split("/")
    if parts[0] == "..":  # scripts contain the path of their interpreter
        return len(parts) > 1 and parts[-2] in _SCRIPTS
    return len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _ADDED


def _needs_hash(path: Path) -> bool:
    return path.suffix != ".pyc" and path.parent.suffix != ".dist-info"


def _is_module_suffix(suffix: str) -> bool:
    """Tell whether ``suffix`` turns a module's path into a file: ``.py``, ``.abi3.so``, ..."""
    is_native = suffix.startswith(".") and suffix.endswith((".so", ".pyd"))
    return "/" not in suffix and (suffix in (".py", ".pyc") or is_native)
