"""The breakages of a plugin in other versions of its host, with the first version of each."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from interposer.errors import ConfigError
from interposer_tools._seams.findings import Finding, Reading, Use, UseKind
from interposer_tools._seams.plugin_reader import read_plugin
from interposer_tools._seams.program import Program
from interposer_tools._seams.source_tree import SourceTree

__all__ = ["Breakage", "SeamReport", "compare_versions"]

_MAX_HINTS = 2
# Names that many modules define say nothing about a move.
_MAX_DEFINITIONS = 4


@dataclass(frozen=True, slots=True)
class Breakage:
    """A use of the host that a version of the host does not support.

    Attributes:
        finding: the use in the plugin, and the reason in the first version that breaks it.
        broken_in: labels of the versions that break the use, oldest first.
    """

    finding: Finding
    broken_in: tuple[str, ...]

    @property
    def since(self) -> str:
        """Label of the oldest version that breaks the use."""
        return self.broken_in[0]

    def __str__(self) -> str:
        finding = self.finding
        return f"{finding.file}:{finding.line}: {finding.kind} of {finding.name}: {finding.reason}"


@dataclass(frozen=True, slots=True)
class SeamReport:
    """The uses of a host in a plugin, and the breakages in versions of the host.

    Attributes:
        plugin: label of the plugin, such as ``vllm-ascend 0.12.0rc1``.
        host: top-level package of the host.
        works_with: label of the version that the plugin is known to work with, or None.
        versions: labels of the compared versions, oldest first.
    """

    plugin: str
    host: str
    works_with: str | None
    versions: tuple[str, ...]
    uses: tuple[Use, ...]
    breakages: tuple[Breakage, ...]

    def __str__(self) -> str:
        targets = {use.target for use in self.uses}
        lines = [
            f"{self.plugin} uses {len(targets)} names of {self.host} at {len(self.uses)} places."
        ]
        if self.works_with is None:
            lines.append(
                "Only certain breakages are listed. Try: --works-with VERSION, which also finds "
                "changed attributes, overrides and patches"
            )
        else:
            lines.append(f"Compared with {self.works_with}:")
        for version in self.versions:
            broken = [b for b in self.breakages if version in b.broken_in]
            new = [b for b in broken if b.since == version]
            count = f"{len(broken)} breakages" if len(broken) != 1 else "1 breakage"
            suffix = f", {len(new)} of them new" if len(new) != len(broken) else ""
            lines.append(f"{version}: {count}{suffix}")
            for breakage in new:
                end = (
                    ""
                    if breakage.broken_in[-1] == self.versions[-1]
                    else (f" (until {breakage.broken_in[-1]})")
                )
                lines.append(f"  {breakage}{end}")
        return "\n".join(lines)

    def uses_text(self) -> str:
        """Return one line per use: file, line, kind and name in the host."""
        return "\n".join(f"{u.file}:{u.line}: {u.kind} of {u.target}" for u in self.uses)

    def to_json(self, with_uses: bool = False) -> str:
        """Return the report as JSON text."""
        facts: dict[str, object] = {
            "version": 1,
            "plugin": self.plugin,
            "host": self.host,
            "works_with": self.works_with,
            "versions": list(self.versions),
            "breakages": [
                {
                    "file": b.finding.file,
                    "line": b.finding.line,
                    "kind": b.finding.kind,
                    "name": b.finding.name,
                    "reason": b.finding.reason,
                    "since": b.since,
                    "broken_in": list(b.broken_in),
                }
                for b in self.breakages
            ],
            "num_uses": len(self.uses),
        }
        if with_uses:
            facts["uses"] = [
                {"file": u.file, "line": u.line, "kind": u.kind, "target": u.target}
                for u in self.uses
            ]
        return json.dumps(facts, indent=2)


def compare_versions(
    host: str, plugin: SourceTree, works_with: SourceTree | None, versions: Sequence[SourceTree]
) -> SeamReport:
    """Read a plugin against each version of its host, and return the differences.

    Args:
        host: top-level package of the host, such as ``vllm``.
        works_with: the version that the plugin was written for. A fault that already exists in this
            version is an error of reading, or of the plugin, and no breakage. Without it, only
            definite faults are breakages.
    Raises: ConfigError: a version lacks the package ``host``, or the plugin never uses it.
    """
    ordered = sorted(versions, key=lambda tree: tree.sort_key)
    parsed: dict[str, ast.Module] = {}
    for tree in (*ordered, *([works_with] if works_with is not None else [])):
        if host not in tree.packages:
            raise ConfigError(
                f"{tree.location}: contains no package {host!r}, but {_some(tree.packages)}. "
                f"Try: a wheel, sdist or folder of {host}"
            )
    known = Reading()
    if works_with is not None:
        known, _ = _read(host, plugin, works_with, parsed)
    uses = set(known.uses)
    first: dict[object, Finding] = {}
    broken_in: dict[object, list[str]] = {}
    for tree in ordered:
        reading, program = _read(host, plugin, tree, parsed)
        if works_with is None:
            uses |= reading.uses
        for finding in _new_findings(reading, known, works_with is not None):
            place = finding.key[:-1]
            if place not in first:
                first[place] = _with_hint(finding, program)
            labels = broken_in.setdefault(place, [])
            if tree.label not in labels:
                labels.append(tree.label)
    if not uses:
        raise ConfigError(
            f"{plugin.label} uses nothing of {host!r}; it imports "
            f"{_some(_imported_packages(parsed)) or 'nothing'}. Try: another HOST, or another --of"
        )
    breakages = [Breakage(first[key], tuple(labels)) for key, labels in broken_in.items()]
    return SeamReport(
        plugin.label,
        host,
        works_with.label if works_with is not None else None,
        tuple(tree.label for tree in ordered),
        tuple(sorted(uses)),
        tuple(sorted(breakages, key=lambda b: (b.finding.file, b.finding.line))),
    )


def _read(
    host: str, plugin: SourceTree, tree: SourceTree, parsed: dict[str, ast.Module]
) -> tuple[Reading, Program]:
    program = Program(plugin, tree, frozenset({host}), parsed)
    return read_plugin(program), program


def _new_findings(reading: Reading, known: Reading, is_compared: bool) -> Iterator[Finding]:
    """Yield the findings that are breakages: new ones, or definite ones without a comparison."""
    known_keys = {finding.key for finding in known.findings}
    for finding in reading.findings:
        if not is_compared:
            if finding.is_definite:
                yield finding
            continue
        # A call of another class's method of the same name proves nothing about a method whose
        # signature is as it was.
        place = (finding.file, finding.line, finding.name)
        original = reading.originals.get(place)
        is_same = original is not None and original == known.originals.get(place)
        if finding.key not in known_keys and not is_same:
            yield finding


def _with_hint(finding: Finding, program: Program) -> Finding:
    """Add the modules that define a missing name now, if they are few."""
    if finding.kind not in (UseKind.IMPORT, UseKind.ATTRIBUTE, UseKind.DECLARED):
        return finding
    if " has no " not in finding.reason and "no module" not in finding.reason:
        return finding
    name = finding.name.rpartition(":")[2].rpartition(".")[2]
    modules = program.definitions(name)
    if not 0 < len(modules) <= _MAX_DEFINITIONS:
        return finding
    places = " and ".join(modules[:_MAX_HINTS])
    return replace(finding, reason=f"{finding.reason}; now in {places}")


def _imported_packages(parsed: dict[str, ast.Module]) -> frozenset[str]:
    names = set()
    for tree in parsed.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return frozenset(names)


def _some(names: frozenset[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
