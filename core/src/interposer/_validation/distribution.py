"""Facts of an installed distribution, read from metadata without importing code."""

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
        *("interposer", "interposer-adapt", "interposer-engine", "interposer-models"),
        *("interposer-ops", "interposer-quantization"),
        *("interposer-sandbox", "interposer-serve", "interposer-testing", "interposer-tools"),
    }
)
"""The distributions of the SDK itself."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Name, version, code hash and requirements of an installed distribution.

    Attributes:
        name: the normalized name; ``"unknown"`` if the metadata has no usable one.
        version: ``"0"`` if the metadata has no usable one.
        fingerprint: hexadecimal SHA-256 that changes with the code. Covers the paths and hashes in
            RECORD, except files that the installer adds, so that every machine with the same wheel
            has the same fingerprint. Without RECORD, and additionally for an editable installation,
            covers paths, sizes and times of the source files.
        requires: the lines ``Requires-Dist``.
        location: the base folder of RECORD's paths, or the folder of the source files.
        editable: the code is a source folder that may change at any time.
        problem: the reason why the metadata is unusable, or empty.
        record: the text of RECORD; empty without one and for an editable installation.
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
        """Whether the distribution is a part of the SDK."""
        return self.name in STANDARD

    def altered_files(self) -> list[str]:
        """Return the paths in RECORD of missing, altered and unhashed files.

        Empty for an editable installation, which has no record of the code.
        """
        return altered_files(self.record, Path(self.location))

    def owns_module(self, module: str) -> bool:
        """Tell whether RECORD lists the file of ``module``; True without a RECORD."""
        return not self.record or has_module(self.record, module)


def read_distribution(metadata: Metadata) -> Distribution:
    """Read the facts of a distribution; unusable metadata is reported in ``problem``."""
    headers = metadata_headers(
        metadata_text(metadata, "METADATA") or metadata_text(metadata, "PKG-INFO")
    )
    name, version, problem = _identity(metadata, headers)
    # The code of an editable installation is in its source folder, and RECORD lists only the link.
    source = editable_folder(metadata)
    record = "" if source else metadata_text(metadata, "RECORD")
    location = source or Path(str(metadata.locate_file("")))
    content: list[object] = (
        [metadata_text(metadata, "RECORD")] if source else []
    )  # covers compiled modules
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
        # A RECORD without hashes says nothing about the content, so the files are examined.
        paths = [] if content else [location / name for name, _ in rows if name.isprintable()]
    else:
        # An egg: the metadata only names top-level modules.
        tops = metadata_text(metadata, "top_level.txt").split() or [name.replace("-", "_")]
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


def _identity(metadata: Metadata, headers: list[tuple[str, str]]) -> tuple[str, str, str]:
    """Return the name and version of a distribution, and a description of faults."""
    names = [value for key, value in headers if key == "name"]
    versions = [value for key, value in headers if key == "version"]
    folder = metadata_folder(metadata)
    has_metadata_suffix = folder.suffix in (".dist-info", ".egg-info")
    installed_as = folder.stem.partition("-")[0] if has_metadata_suffix else ""
    name, version, problems = "unknown", "0", []
    if len(names) != 1 or not _NAME.fullmatch(names[0]):
        problems.append(f"the name {', '.join(names)!r}")
    elif installed_as and canonicalize_name(installed_as) != canonicalize_name(names[0]):
        problems.append(f"the name {names[0]!r}, though it is installed as {installed_as!r}")
    else:
        name = canonicalize_name(names[0])
    try:
        version = str(Version(*versions))
    except (ValueError, TypeError):  # also for a number with thousands of digits
        problems.append(f"the version {', '.join(versions)!r:.100}")
    if not problems:
        return name, version, ""
    where = "" if headers else f", as {folder} has none that can be read"
    return name, version, f"its metadata states {' and '.join(problems)}{where}"
