"""The machine that a bundle is for, as ``target.toml`` describes it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Target", "read_target"]

_FILE = Path(__file__).with_name("target.toml")


@dataclass(frozen=True, slots=True)
class Target:
    """A machine without a network.

    Attributes:
        python: its version, as ``"3.12"``.
        platforms: tags of wheels that it takes, the best first.
        installed: versions of packages that it has and no bundle holds; empty where unknown.
        extras: of our distributions, whose requirements come along.
        tests: requirements of the tests that run there.
        left_out: folders of distributions that stay here, with the reason.
    """

    python: str
    implementation: str
    machine: str
    platforms: tuple[str, ...]
    limit_mib: int
    extras: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: Mapping[str, str]
    installed: Mapping[str, str]

    @property
    def markers(self) -> dict[str, str]:
        """Return the values that markers of requirements are evaluated with."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def read_target(file: Path = _FILE) -> Target:
    """Return the target that a file describes."""
    facts = tomllib.loads(file.read_text(encoding="utf-8"))
    for name in ("platforms", "extras", "tests"):
        facts[name] = tuple(facts[name])
    return Target(**facts)
