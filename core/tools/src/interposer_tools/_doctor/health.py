"""The report of ``interposer doctor`` as data, JSON and text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from interposer.tooling import Skipped

VERSION = 1
"""Version of the format that ``Health.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A failure of the installation, with the reason and a way to fix the failure."""

    subject: str
    reason: str
    mend: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ProbedPlatform:
    """A platform with the probe's result and the other platforms whose kernels can run here."""

    name: str
    provider: str
    version: str
    score: float
    accepted: bool
    reason: str
    runs: list[str] = field(default_factory=list)

    def description(self, installed: Collection[str]) -> str:
        """Describe the probe result and the kernels that the platform runs.

        Args:
            installed: the names of all installed platforms.
        """
        # An accepted platform may give no reason.
        answer = f"{'accepted' if self.accepted else 'refused'}: {self.reason}".removesuffix(": ")
        platforms = (n if n in installed else f"{n}, which is not installed" for n in self.runs)
        return "; ".join([answer, *(f"runs the kernels of {platform}" for platform in platforms)])


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """A loaded plugin, with the number of records per class and the names of other hooks."""

    name: str
    distribution: str
    version: str
    records: dict[str, int]
    hooks: list[str]

    @property
    def origin(self) -> str:
        """Distribution and version, such as "acme-kernels 1.2"."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache folder, with the number of entries per kind."""

    path: str
    entries: dict[str, int]


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A source of configuration, such as a file, and the fields set there."""

    name: str
    path: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Health:
    """The state of an installation. ``problems`` is empty if everything works.

    Attributes:
        versions: versions of interposer, the plugin API, Python and the operating system.
        torch: version, build and accelerator type of torch.
        sources: sources of configuration, the strongest first.
        device: description of the selected device, or None.
        machine: further facts about this machine, by subject.
        cache: the cache folder with numbers of entries.
        lock: the lock file and whether the installation matches; "" without a lock file.
        warnings: warnings of loaded plugins; failures are in ``problems``.
    """

    versions: dict[str, str]
    torch: dict[str, Any]
    sources: list[PolicySource] = field(default_factory=list)
    platforms: list[ProbedPlatform] = field(default_factory=list)
    device: dict[str, Any] | None = None
    machine: dict[str, str] = field(default_factory=dict)
    plugins: list[InstalledPlugin] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    cache: Cache | None = None
    lock: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if nothing failed."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to lists and dictionaries, with the same facts as the text."""
        return {"version": VERSION, "healthy": self.healthy, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def head(self) -> list[str]:
        """The lines about versions and the selected device."""
        versions, torch = self.versions, self.torch
        # For example "cuda 12.6" or "hip 6.3"; a CPU build has neither.
        build = ", ".join(f"{name} {value}" for name, value in torch["build"].items())
        lines = [
            f"interposer {versions['interposer']}, API {versions['api']}, "
            f"Python {versions['python']}, {versions['system']}",
            f"torch {torch['version']} ({build}), {torch['threads']} threads, built for "
            f"{torch['accelerator'] or 'no accelerator'}",
        ]
        if self.device is not None:
            d = self.device
            memory = f"{d['memory_bytes'] / 2**30:.1f} GiB"
            facts = f"{d['architecture']}, {d['units']} units, {memory}, {', '.join(d['dtypes'])}"
            lines.append(f"device: {d['torch_device']} ({d['name']}): {facts}")
        return lines

    def sections(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield title, column titles and rows of every table that has rows."""
        names = [platform.name for platform in self.platforms]
        tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
            ("this machine", ("subject", "fact"), [*self.machine.items()]),
            (
                "platforms",
                ("platform", "provider", "probe"),
                [
                    (p.name, f"{p.provider} {p.version}", p.description(names))
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
            # A table without rows is not shown, so an empty cache gets the row "empty".
            rows: list[tuple[str, ...]] = [
                (kind, f"{number} entries") for kind, number in self.cache.entries.items()
            ]
            tables.append((f"cache {self.cache.path}", ("kind", "holds"), rows or [("empty", "")]))
        if self.lock:
            # ``lock`` is "PATH: STATE", and a path may contain ": " too.
            path, _, state = self.lock.rpartition(": ")
            tables.append(("lock", ("file", "state"), [(path, state)]))
        yield from (section for section in tables if section[2])

    def problem_blocks(self) -> list[list[str]]:
        """Return a block of lines for every problem, or the block "Nothing failed."."""
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


def _line(name: str, origin: str, text: str = "") -> str:
    """Format the cells of a table row as one line of text; ``origin`` may be empty."""
    if not text:
        return f"{name}: {origin}" if origin else name
    return f"{name} ({origin}): {text}" if origin else f"{name}: {text}"


def _provided(plugin: InstalledPlugin) -> str:
    counts = [f"{count} {kind}" for kind, count in plugin.records.items()]
    return ", ".join([*counts, *plugin.hooks]) or "nothing"


def _fields(fields: dict[str, Any]) -> str:
    settings = (f"{name} = {'none' if value == [] else value}" for name, value in fields.items())
    return ", ".join(settings) or "nothing"
