"""Wheels, written as a build backend writes them: files, metadata and a RECORD of every hash."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Wheel"]

GROUP = "interposer.plugins"
PURE = "py3-none-any"


@dataclass(frozen=True, slots=True)
class Wheel:
    """The content of one wheel.

    Attributes:
        files: content by path inside the wheel.
        plugins: value of the entry point by name.
        tag: of the platform, where a file is native.
    """

    name: str
    version: str
    files: Mapping[str, bytes]
    plugins: Mapping[str, str]
    requires: tuple[str, ...] = ()
    tag: str = field(default=PURE, kw_only=True)

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def info(self) -> str:
        """Return the name of the folder of metadata."""
        return f"{self.stem}.dist-info"

    def write(self, folder: Path) -> Path:
        """Return the path of the wheel, written to ``folder``."""
        contents = {**self.files, **self._metadata()}
        record = f"{self.info}/RECORD"
        path = folder / f"{self.stem}-{self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**contents, record: _record(contents, record)}.items():
                archive.writestr(name, content)
        return path

    def _metadata(self) -> dict[str, bytes]:
        requires = "".join(f"Requires-Dist: {text}\n" for text in self.requires)
        plugins = "".join(f"{name} = {value}\n" for name, value in self.plugins.items())
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
            f"Requires-Python: >=3.11\n{requires}",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: hostile (1.0)\n"
            f"Root-Is-Purelib: {str(self.tag == PURE).lower()}\nTag: {self.tag}\n",
            "entry_points.txt": f"[{GROUP}]\n{plugins}",
        }
        return {f"{self.info}/{name}": text.encode() for name, text in texts.items()}


def _record(contents: Mapping[str, bytes], record: str) -> bytes:
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([record, "", ""])
    return rows.getvalue().encode()
