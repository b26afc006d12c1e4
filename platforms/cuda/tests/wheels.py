"""Packages that a test makes and installs, as an index would provide them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["install"]


def install(folder: Path, name: str, version: str, module: str, code: str) -> None:
    """Make a wheel of one module and install it into ``folder / "site"``, without an index."""
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{module}.py", code)
        info = f"{stem}.dist-info"
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    target = str(folder / "site")
    subprocess.run([*command, "--target", target, str(wheel)], check=True, timeout=300)
