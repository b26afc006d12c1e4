"""The manifest of a bundle: its wheels, and what each of them is there for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MANIFEST", "Bundle", "Wheel"]

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel.

    Attributes:
        wanted: the versions that serve whoever requires it, as a specifier.
        ours: whether it is built from this repository, and so replaces whatever is there.
    """

    file: str
    name: str
    version: str
    sha256: str
    wanted: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder of wheels.

    Attributes:
        commit: of this repository, as far as it is known.
        checksum: of all wheels; a folder with equal ones is the same bundle.
    """

    folder: Path
    python: str
    commit: str
    wheels: tuple[Wheel, ...]

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the wheels' names and checksums, which identifies the bundle."""
        named = "\n".join(sorted(f"{wheel.file} {wheel.sha256}" for wheel in self.wheels))
        return hashlib.sha256(named.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files in the folder."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def faults(self) -> Iterator[str]:
        """Yield a description of each file that is missing or differs from the bundled one."""
        for wheel in self.wheels:
            file = self.folder / wheel.file
            if not file.is_file():
                yield f"{wheel.file} is missing"
            elif sha256(file) != wheel.sha256:
                yield f"{wheel.file} is not what was bundled: its checksum differs"

    def write(self) -> None:
        """Write the manifest beside the wheels."""
        facts = {
            "python": self.python,
            "commit": self.commit,
            "wheels": [asdict(wheel) for wheel in self.wheels],
        }
        text = json.dumps(facts, indent=1) + "\n"
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Return the bundle in a folder; end with a sentence if there is none."""
        try:
            facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SystemExit(f"{folder} is no bundle: {error}. Try: make gpu-bundle") from error
        wheels = tuple(Wheel(**wheel) for wheel in facts["wheels"])
        return cls(folder, facts["python"], facts["commit"], wheels)


def sha256(file: Path) -> str:
    """Return the checksum of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
