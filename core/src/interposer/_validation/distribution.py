"""Facts of an installed distribution, read from its metadata without importing its code."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from interposer._config.storage import checksum
from interposer_sandbox import (
    Metadata,
    altered_files,
    editable_folder,
    file_facts,
    has_module,
    metadata_folder,
    metadata_headers,
    metadata_text,
    recorded_files,
)

STANDARD = frozenset(
    {
        *("interposer", "interposer-models", "interposer-ops", "interposer-quantization"),
        *("interposer-sandbox", "interposer-serve", "interposer-testing", "interposer-tools"),
    }
)
"""The distributions that the SDK itself consists of."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Distribution:
    """The facts of an installed distribution.

    Attributes:
        name: the normalized name; ``"unknown"`` if the metadata has no usable one.
        version: ``"0"`` if the metadata has no usable one.
        fingerprint: hexadecimal SHA-256 that changes when the code does. It is taken from paths
            and hashes in RECORD, without what the installer adds, so it is the same on every
            machine that has the same wheel. Without RECORD, and for an editable installation
            beside it, it is taken from paths, sizes and times of the source files.
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

        An editable installation has no record of its code, so that the list is empty.
        """
        return altered_files(self.record, Path(self.location))

    def owns_module(self, module: str) -> bool:
        """Say whether the file of ``module`` stands in RECORD; True where there is no RECORD."""
        return not self.record or has_module(self.record, module)


def read_distribution(found: Metadata) -> Distribution:
    """Return the facts of a distribution, whatever state its metadata is in."""
    headers = metadata_headers(metadata_text(found, "METADATA") or metadata_text(found, "PKG-INFO"))
    name, version, problem = _identity(found, headers)
    source = editable_folder(found)
    record = "" if source else metadata_text(found, "RECORD")
    location = source or Path(str(found.locate_file("")))
    content: list[object] = [metadata_text(found, "RECORD")] if source else []  # what is compiled
    if source:
        paths = [source]
    elif record:
        try:
            rows = sorted(recorded_files(record))
            code = [row for row in rows if row[1]]
            content = [code] if code else []
        except csv.Error as error:
            rows, content, record = [], [record], ""
            problem = problem or f"its RECORD cannot be read: {error}"
        # Without hashes it would be the same for any content.
        paths = [] if content else [location / name for name, _ in rows if name.isprintable()]
    else:
        tops = metadata_text(found, "top_level.txt").split() or [name.replace("-", "_")]
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


def _identity(found: Metadata, headers: list[tuple[str, str]]) -> tuple[str, str, str]:
    """Return the name and version of a distribution, and a description of faults in them."""
    names = [value for key, value in headers if key == "name"]
    versions = [value for key, value in headers if key == "version"]
    folder = metadata_folder(found)
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
    except (ValueError, TypeError):  # among them that of a number with thousands of digits
        problems.append(f"the version {', '.join(versions)!r:.100}")
    if not problems:
        return name, version, ""
    where = "" if headers else f", as {folder} has none that can be read"
    return name, version, f"its metadata states {' and '.join(problems)}{where}"
