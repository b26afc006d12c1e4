"""The installation of a bundle beside a Python, which itself stays as it is."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evidence.manifest import Bundle, Wheel

__all__ = ["Installation", "InstallationError"]

_STAMP = "installed-bundle"
_LIMIT_S = 240


class InstallationError(Exception):
    """The bundle cannot be installed; the text says why."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A folder with what a bundle adds to a Python; PYTHONPATH names it."""

    folder: Path

    def install(self, bundle: Bundle) -> list[str]:
        """Install ours, and of the others what is missing or of a wrong version here.

        Returns: the names of what was installed; empty if this bundle is there already.
        Raises: InstallationError: the bundle is damaged or for another Python, or pip fails.
        """
        stamp = self.folder / _STAMP
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == bundle.checksum:
            return []
        running = "{}.{}".format(*sys.version_info)
        if running != bundle.python:
            raise InstallationError(
                f"the bundle is for Python {bundle.python}, this is {running}. Try: another "
                "Python, or another version in benchmarks/evidence/target.toml and a new bundle"
            )
        for fault in bundle.faults():
            raise InstallationError(f"{fault}. Try: make gpu-bundle")
        shutil.rmtree(self.folder, ignore_errors=True)
        wheels = list(_lacking(bundle))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
                *("--no-compile", "--disable-pip-version-check", "--target", str(self.folder)),
                *(str(bundle.folder / wheel.file) for wheel in wheels),
            ],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise InstallationError(f"pip failed: {done.stderr[-2000:]}")
        stamp.write_text(bundle.checksum, encoding="utf-8")
        return [f"{wheel.name} {wheel.version}" for wheel in wheels]


def _lacking(bundle: Bundle) -> Iterator[Wheel]:
    """Yield our wheels, and those of the others that this Python lacks or has too old."""
    (packaging,) = (wheel.file for wheel in bundle.wheels if wheel.name == "packaging")
    # A wheel of pure Python can be imported as it is.
    sys.path.insert(0, str(bundle.folder / packaging))
    try:
        from packaging.specifiers import SpecifierSet
    finally:
        del sys.path[0]
    for wheel in bundle.wheels:
        try:
            version = importlib.metadata.version(wheel.name)
        except importlib.metadata.PackageNotFoundError:
            yield wheel
            continue
        if wheel.ours or not SpecifierSet(wheel.wanted).contains(version, prereleases=True):
            yield wheel
