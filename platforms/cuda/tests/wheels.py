"""Wheels that tests build and install with pip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["install", "wheel"]


def wheel(folder: Path, name: str, version: str, modules: Mapping[str, str]) -> Path:
    """Build a wheel from the source texts of its modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for module, code in modules.items():
            file.writestr(f"{module}.py", code)
        info = f"{stem}.dist-info"
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def install(folder: Path, *wheels: Path) -> Path:
    """Install wheels with pip, without an index, and return the folder."""
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*command, "--target", str(site), *map(str, wheels)], check=True, timeout=300)
    return site
