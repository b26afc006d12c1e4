"""Optional kernel packages that must match the installed torch.

The metadata is checked first, at almost no cost. Only a package whose metadata matches is imported,
in a child process, because a mismatch may still crash the interpreter.
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
    """An optional kernel package, which an inquiry program examines in a child process.

    Attributes:
        distribution: name of the distribution.
        inquiry: path of the program that imports the package and prints JSON.
    """

    distribution: str
    inquiry: str

    @property
    def version(self) -> str:
        """Installed version; "" if the package is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    @property
    def description(self) -> str:
        """Long description from the package's metadata."""
        return metadata(self.distribution).json.get("description", "")  # type: ignore[return-value]

    def ask(self, *arguments: str) -> tuple[dict[str, Any], Verdict]:
        """Run the inquiry program in a child process.

        Returns: the printed JSON object, and a refusal if the process printed none or hung.
        """
        package = f"{self.distribution} {self.version}"
        try:
            # -P keeps the program's folder out of sys.path, so its modules cannot hide others.
            process = _run_child([sys.executable, "-P", self.inquiry, *arguments])
        except subprocess.TimeoutExpired:
            return {}, Verdict.refuse(f"{package} was not imported in {_LIMIT_SECONDS:g} s")
        try:
            facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last_line = [
                *process.stdout.strip().splitlines(),
                *process.stderr.strip().splitlines(),
            ][-1:]
            text = last_line[0] if last_line else "it printed nothing"
            return {}, Verdict.refuse(
                f"{package} ends the process that imports it ({exit_text(process.returncode)}): "
                f"{text}"
            )
        return facts, Verdict.accept()


def _run_child(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )


def exit_text(code: int) -> str:
    """Describe an exit code: a signal if negative, else an exit status."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+xpu."""
    parts = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def torch_version() -> str:
    """Return torch's version from metadata, without importing torch."""
    return version("torch")
