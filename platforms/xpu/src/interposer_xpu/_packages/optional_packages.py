"""Packages beside torch that bring kernels where they are installed and fit to it.

What the metadata says is asked first, and costs nothing. Only a package that fits by it is
imported, in a process of its own: one that does not fit after all may end its interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

from interposer import Verdict

_LIMIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Package:
    """One such package.

    Attributes:
        distribution: what it is installed as.
        inquiry: path of the program that imports it and prints JSON.
    """

    distribution: str
    inquiry: str

    @property
    def version(self) -> str:
        """Its version; empty where it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    @property
    def description(self) -> str:
        """Return the long description of its metadata."""
        return metadata(self.distribution).json.get("description", "")  # type: ignore[return-value]

    def ask(self, *arguments: str) -> tuple[dict[str, Any], Verdict]:
        """Return the output of its inquiry, or the exit status of a process without output."""
        named = f"{self.distribution} {self.version}"
        try:
            # -P: the modules beside the program are no modules of its own, one is named platform.
            done = _run([sys.executable, "-P", self.inquiry, *arguments])
        except subprocess.TimeoutExpired:
            return {}, Verdict.refuse(f"{named} was not imported in {_LIMIT_SECONDS:g} s")
        try:
            facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            said = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()][-1:]
            text = said[0] if said else "it printed nothing"
            return {}, Verdict.refuse(
                f"{named} ends the process that imports it ({ended(done.returncode)}): {text}"
            )
        return facts, Verdict.accept()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )


def ended(code: int) -> str:
    """Say how a process ended."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def numbers(text: str) -> tuple[int, ...]:
    """Return what a version begins with: (2, 13, 0) of 2.13.0+xpu."""
    found = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def torch_version() -> str:
    """Return the version of torch, which is not imported for it."""
    return version("torch")
