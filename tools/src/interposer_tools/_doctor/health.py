"""The health of an installation as plain data, and as text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
"""Of what ``Health.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not work, and what to do about it."""

    subject: str
    reason: str
    mend: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ProbedPlatform:
    """A platform, what its probe says of this machine, and whose kernels it runs as well."""

    name: str
    provider: str
    version: str
    score: float
    accepted: bool
    reason: str
    runs: list[str] = field(default_factory=list)

    def said(self, installed: Collection[str]) -> str:
        """Return all that is known of it, for people.

        Args:
            installed: the names of all platforms.
        """
        answer = f"{'accepted' if self.accepted else 'refused'}: {self.reason}".removesuffix(": ")
        others = (n if n in installed else f"{n}, which is not installed" for n in self.runs)
        return "; ".join([answer, *(f"runs the kernels of {other}" for other in others)])


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """A plugin that is in use, with the number of its records by class and its other hooks."""

    name: str
    distribution: str
    version: str
    records: dict[str, int]
    hooks: list[str]

    @property
    def origin(self) -> str:
        """Distribution and version, for people."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class SkippedPlugin:
    """A plugin that the policy leaves out."""

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache between processes: numbers of entries by kind."""

    path: str
    entries: dict[str, int]


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A place where the policy is set, the strongest first, and what it sets."""

    name: str
    path: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Health:
    """All facts of an installation; ``problems`` is empty if everything works.

    Attributes:
        versions: of interposer, its plugin API, Python and the system.
        torch: version, build and the kind of accelerator that it was built for.
        sources: where the policy is set.
        device: description of the device in force; None without one.
        machine: what else its platform says of this machine, by subject.
        cache: what is remembered between processes.
        lock: the lock file and whether the installation is as locked; empty without one.
        warnings: what was said while plugins were loaded, failures apart.
    """

    versions: dict[str, str]
    torch: dict[str, Any]
    sources: list[PolicySource] = field(default_factory=list)
    platforms: list[ProbedPlatform] = field(default_factory=list)
    device: dict[str, Any] | None = None
    machine: dict[str, str] = field(default_factory=dict)
    plugins: list[InstalledPlugin] = field(default_factory=list)
    skipped: list[SkippedPlugin] = field(default_factory=list)
    cache: Cache | None = None
    lock: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if nothing failed."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and dictionaries, the same facts as the text."""
        return {"version": VERSION, "healthy": self.healthy, **asdict(self)}

    def to_json(self) -> str:
        """Return ``to_dict()`` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def head(self) -> list[str]:
        """The versions and the device in force, line by line."""
        told, torch = self.versions, self.torch
        build = ", ".join(f"{name} {value}" for name, value in torch["build"].items())
        lines = [
            f"interposer {told['interposer']}, API {told['api']}, Python {told['python']}, "
            f"{told['system']}",
            f"torch {torch['version']} ({build}), {torch['threads']} threads, built for "
            f"{torch['accelerator'] or 'no accelerator'}",
        ]
        if self.device is not None:
            d = self.device
            memory = f"{d['memory_bytes'] / 2**30:.1f} GiB"
            what = f"{d['architecture']}, {d['units']} units, {memory}, {', '.join(d['dtypes'])}"
            lines.append(f"device: {d['torch_device']} ({d['name']}): {what}")
        return lines

    def sections(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield title, column titles and rows of every table that has any."""
        found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
            ("this machine", ("subject", "what holds"), [*self.machine.items()]),
            (
                "platforms",
                ("platform", "provider", "probe"),
                [
                    (p.name, f"{p.provider} {p.version}", p.said([p.name for p in self.platforms]))
                    for p in self.platforms
                ],
            ),
            (
                "plugins",
                ("plugin", "distribution", "provides"),
                [
                    *((p.name, p.origin, _provided(p)) for p in self.plugins),
                    *((s.name, s.distribution, f"not used: {s.reason}") for s in self.skipped),
                ],
            ),
            (
                "policy, the strongest first",
                ("source", "file", "sets"),
                [(s.name, s.path, _fields(s.fields)) for s in self.sources],
            ),
        ]
        if self.cache is not None:
            rows: list[tuple[str, ...]] = [
                (kind, f"{number} entries") for kind, number in self.cache.entries.items()
            ]
            found.append((f"cache {self.cache.path}", ("kind", "holds"), rows or [("empty", "")]))
        if self.lock:
            path, _, state = self.lock.rpartition(": ")
            found.append(("lock", ("file", "state"), [(path, state)]))
        yield from (section for section in found if section[2])

    def problem_blocks(self) -> list[list[str]]:
        """Return a block of lines for every problem, or one that says there is none."""
        blocks = []
        for problem in self.problems:
            lines = [f"FAILED {problem.subject}: {problem.reason}"]
            lines += [f"  Try: {problem.mend}"] if problem.mend else []
            lines += [f"    {line}" for line in problem.traceback.splitlines()]
            blocks.append(lines)
        return blocks or [["Nothing failed."]]

    def __str__(self) -> str:
        blocks = [self.head]
        for title, _, rows in self.sections():
            blocks.append([f"{title}:", *(f"  {_line(*cells)}" for cells in rows)])
        blocks += [[f"warning: {warning}"] for warning in self.warnings]
        blocks += self.problem_blocks()
        return "\n\n".join("\n".join(block) for block in blocks)


def _line(name: str, origin: str, what: str = "") -> str:
    """Return the cells of a row as a line; the middle one may be empty."""
    if not what:
        return f"{name}: {origin}" if origin else name
    return f"{name} ({origin}): {what}" if origin else f"{name}: {what}"


def _provided(plugin: InstalledPlugin) -> str:
    counts = [f"{count} {kind}" for kind, count in plugin.records.items()]
    return ", ".join([*counts, *plugin.hooks]) or "nothing"


def _fields(fields: dict[str, Any]) -> str:
    said = (f"{name} = {'none' if value == [] else value}" for name, value in fields.items())
    return ", ".join(said) or "nothing"
