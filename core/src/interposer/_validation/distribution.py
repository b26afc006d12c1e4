"""Facts of an installed distribution, read from its metadata without importing its code."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from interposer._config.storage import checksum
from interposer_sandbox import file_facts, is_altered

STANDARD = frozenset(
    {
        *("interposer", "interposer-models", "interposer-ops", "interposer-quantization"),
        *("interposer-sandbox", "interposer-testing", "interposer-tools"),
    }
)
"""The distributions that the SDK itself consists of."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# What an installer adds to a wheel: it differs from machine to machine, the code does not.
_ADDED = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
_SCRIPTS = frozenset({"bin", "Scripts"})


class Metadata(Protocol):
    """The members of a distribution that importlib.metadata finds, or its backport."""

    def read_text(self, filename: str, /) -> str | None:
        """Return the text of a metadata file, or None without one."""

    def locate_file(self, path: str, /) -> object:
        """Return the path of an installed file."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The facts of an installed distribution.

    Attributes:
        name: the normalized name; ``"unknown"`` if the metadata has no usable one.
        version: ``"0"`` if the metadata has no usable one.
        fingerprint: hexadecimal SHA-256 that changes when the code does. It is taken from paths
            and hashes in RECORD, without what the installer adds, so it is the same on every
            machine that has the same wheel. Without RECORD, and for an editable installation, it
            is taken from paths, sizes and times of the source files.
        requires: the lines ``Requires-Dist``.
        location: the folder that RECORD's paths start from, or that holds the source files.
        editable: the code is a source folder that may change at any time.
        problem: what makes the metadata unusable, or empty.
        record: the text of RECORD, empty without one and for an editable installation.
    """

    name: str
    version: str
    fingerprint: str
    requires: tuple[str, ...]
    location: str
    editable: bool
    problem: str = ""
    record: str = field(default="", repr=False, compare=False)

    @property
    def standard(self) -> bool:
        """True for a part of the SDK itself."""
        return self.name in STANDARD

    def altered_files(self) -> list[str]:
        """Return the paths in RECORD whose file is missing, has other content or has no hash.

        What the installer adds is not checked: scripts, cached bytecode and its own notes. An
        editable installation has no record of its code, so nothing can be said of it: the list
        is empty.
        """
        installed = ((path, digest) for path, digest in _rows(self.record) if not _is_added(path))
        return [
            path
            for path, digest in installed
            if (digest or _wants_hash(Path(path))) and is_altered(Path(self.location, path), digest)
        ]

    def owns_module(self, module: str) -> bool:
        """Say whether the file of ``module`` stands in RECORD; True where there is no RECORD."""
        if not self.record:
            return True
        stem = module.replace(".", "/")
        ends = (path.removeprefix(stem) for path, _ in _rows(self.record) if path.startswith(stem))
        return any(_ends_a_module(end.removeprefix("/__init__")) for end in ends)


def read_distribution(found: Metadata) -> Distribution:
    """Return the facts of a distribution, whatever state its metadata is in."""
    headers = _headers(_text(found, "METADATA") or _text(found, "PKG-INFO"))
    name, version, problem = _identity(found, headers)
    source = _editable_folder(_text(found, "direct_url.json"))
    record = "" if source else _text(found, "RECORD")
    location = source or Path(str(found.locate_file("")))
    content: list[object] = []
    if source:
        paths = [source]
    elif record:
        try:
            rows = sorted(row for row in _rows(record) if not _is_added(row[0]))
            code = [row for row in rows if row[1]]
            content = [code] if code else []
        except csv.Error as error:
            rows, content, record = [], [record], ""
            problem = problem or f"its RECORD cannot be read: {error}"
        # Without hashes it would be the same for any content.
        paths = [] if content else [location / name for name, _ in rows if name.isprintable()]
    else:
        tops = _text(found, "top_level.txt").split() or [name.replace("-", "_")]
        names = [top for top in tops if top.isidentifier()]
        paths = [location / file for top in names for file in (top, f"{top}.py")]
    content += [facts for path in sorted(paths) for facts in file_facts(path)]
    return Distribution(
        name=name,
        version=version,
        fingerprint=checksum(content),
        requires=tuple(value for key, value in headers if key == "requires-dist"),
        location=str(location),
        editable=source is not None,
        problem=problem,
        record=record,
    )


def _text(found: Metadata, name: str) -> str:
    try:
        return found.read_text(name) or ""
    except (OSError, ValueError):  # not readable, or not UTF-8
        return ""


def _headers(metadata: str) -> list[tuple[str, str]]:
    """Return the headers in lower case with their values; the description is left out.

    The parser for mail takes ten times as long, which counts with a hundred plugins.
    """
    headers: list[tuple[str, str]] = []
    for line in metadata.split("\n"):
        if not line.strip():
            break
        if line[0] in " \t" and headers:
            key, value = headers.pop()
            headers.append((key, f"{value} {line.strip()}"))
        else:
            key, _, value = line.partition(":")
            headers.append((key.strip().lower(), value.strip()))
    return headers


def _identity(found: Metadata, headers: list[tuple[str, str]]) -> tuple[str, str, str]:
    """Return name, version and what is wrong with them."""
    names = [value for key, value in headers if key == "name"]
    versions = [value for key, value in headers if key == "version"]
    # The folder of the metadata is what installers go by. It is no public attribute.
    folder = Path(str(getattr(found, "_path", "")))
    kept = folder.suffix in (".dist-info", ".egg-info")
    installed_as = folder.stem.partition("-")[0] if kept else ""
    name, version, problems = "unknown", "0", []
    if len(names) != 1 or not _NAME.fullmatch(names[0]):
        problems.append(f"the name {', '.join(names)!r}")
    elif installed_as and canonicalize_name(installed_as) != canonicalize_name(names[0]):
        problems.append(f"the name {names[0]!r}, though it is installed as {installed_as!r}")
    else:
        name = canonicalize_name(names[0])
    try:
        version = str(Version(*versions))
    except (InvalidVersion, TypeError):
        problems.append(f"the version {', '.join(versions)!r}")
    return name, version, f"its metadata states {' and '.join(problems)}" if problems else ""


def _editable_folder(direct_url: str) -> Path | None:
    """Return the source folder of an editable installation, or None for any other."""
    try:
        origin = json.loads(direct_url) if direct_url else {}
        url = urlsplit(origin["url"]) if origin["dir_info"]["editable"] is True else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if url is None or url.scheme != "file":
        return None
    path = unquote(url.path)
    folder = Path(path[1:] if re.match(r"/[A-Za-z]:", path) else path)
    return folder / "src" if (folder / "src").is_dir() else folder


def _rows(record: str) -> Iterator[tuple[str, str]]:
    """Yield path and ``algorithm=digest`` of every line of a RECORD."""
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
