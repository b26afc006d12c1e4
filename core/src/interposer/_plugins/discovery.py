"""Finds the installed plugins; what cannot be trusted or does not work is quarantined."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
from packaging.utils import canonicalize_name

from interposer import hookspecs
from interposer._config.config import Config
from interposer._contract.errors import FOREIGN_ERRORS, described, nearest_first
from interposer._contract.records import OpEntry
from interposer._contract.verdict import Verdict
from interposer._plugins.code import tell_probed
from interposer._plugins.plugins import Plugins, PluginWarning, Skipped, Source
from interposer._plugins.trust import allowed, check_lock
from interposer._sandbox.examiner import examine_all
from interposer._sandbox.inspection import load_value
from interposer._sandbox.task import Finding, Task
from interposer._validation.compatibility import check_api, check_requirements
from interposer._validation.distribution import STANDARD, Distribution, Metadata, read_distribution
from interposer._validation.records import NAME_LIMIT, plain_name


@dataclass(frozen=True, slots=True)
class _Point:
    """An entry point with what is known of its distribution."""

    source: Source
    distribution: Distribution


def discover(config: Config | None = None) -> Plugins:
    """Return every installed plugin that the policy lets in, broken ones quarantined.

    Code of a distribution that is no part of the SDK is imported here only after a child process
    has done so without harm, or after a remembered verdict that it did.

    Raises:
        UnknownNameError: the allow list names a distribution that is not installed.
        LockError: ``config.locked``, and the installed plugins are not the locked ones.
    """
    config = config or Config()
    start = time.time_ns()
    plugins = Plugins()
    broken: list[Source] = []
    points = _wanted(plugins, _installed(broken), config)
    if config.locked:
        check_lock(config, _distributions(points))
    for source in broken:
        plugins.quarantine(source, "its entry_points.txt cannot be read", "reinstall it")
    points = _unrivalled(plugins, points)
    sound = []
    for point in points:
        verdict = _check_metadata(point)
        if verdict:
            sound.append(point)
        else:
            mend = "install a version that fits, or uninstall it"
            plugins.quarantine(point.source, verdict.reason, mend)
    foreign = [point for point in sound if point.distribution.name not in STANDARD]
    findings = examine_all([(p.distribution, _examination(p)) for p in foreign], config)
    found = {p.source.name: f for p, f in zip(foreign, findings, strict=True)}
    for point in sound:
        finding = found.get(point.source.name)
        if finding is None or finding.verdict:
            _load(plugins, point)
        else:
            _refuse(plugins, point.source, finding)
    _settle_ops(plugins)
    plugins.settle()
    for point, finding in zip(foreign, findings, strict=True):
        tell_probed(plugins, point.source.name, _examination(point), finding)
    facts = {"plugins": len(plugins.loaded), "failed": len(plugins.failed)}
    plugins.observe(
        "interposer_finished",
        activity="discovery",
        subject=hookspecs.GROUP,
        start_ns=start,
        end_ns=time.time_ns(),
        facts=facts,
    )
    return plugins


def installed_distributions() -> list[Distribution]:
    """Return the distributions that provide plugins, by name."""
    return _distributions(_installed())


def _installed(broken: list[Source] | None = None) -> list[_Point]:
    """Return all entry points in an order that does not depend on that of the installation.

    Of two distributions of one name the first on the path counts, as for imports. Those whose
    entry points cannot be read are added to ``broken`` if they may be of plugins.
    """
    points: dict[tuple[str, ...], _Point] = {}
    seen = set()
    for found in importlib_metadata.distributions():
        folder = _folder(found)
        if folder in seen:
            continue
        seen.add(folder)
        try:
            entries = found.entry_points.select(group=hookspecs.GROUP)
        except FOREIGN_ERRORS:
            _note_broken(found, broken)
            continue
        if not entries:
            continue
        distribution = read_distribution(found)
        for entry in entries:
            source = Source(
                entry.name, distribution.name, distribution.version, distribution, entry.value
            )
            place = (entry.name, distribution.name, distribution.location, entry.value)
            points[place] = _Point(source, distribution)
    return [points[key] for key in sorted(points)]


def _folder(found: Metadata) -> str:
    """Return what tells distributions apart: the name that they are installed as."""
    # No public attribute, and reading the name from the metadata takes ten times as long.
    path = Path(str(getattr(found, "_path", id(found))))
    return canonicalize_name(path.stem.partition("-")[0])


def _note_broken(found: Metadata, broken: list[Source] | None) -> None:
    try:
        text = Path(str(getattr(found, "_path", "")), "entry_points.txt").read_bytes()
    except OSError:
        text = b""
    if broken is not None and hookspecs.GROUP.encode() in text:
        distribution = read_distribution(found)
        name = distribution.name
        broken.append(Source(name, name, distribution.version, distribution))


def _distributions(points: list[_Point]) -> list[Distribution]:
    found = {(p.distribution.name, p.distribution.location): p.distribution for p in points}
    return [found[key] for key in sorted(found)]


def _wanted(plugins: Plugins, points: list[_Point], config: Config) -> list[_Point]:
    """Return the points that the policy lets in; the others are noted as skipped."""
    disabled = {canonicalize_name(name) for name in config.disable}
    _warn_of_unknown(disabled, points)
    verdicts = allowed(config, [point.distribution for point in points])
    wanted = []
    for point in points:
        verdict = verdicts[point.distribution.name]
        if not disabled.isdisjoint(_names(point)):
            verdict = Verdict.refuse("disabled by the configuration")
        if verdict:
            wanted.append(point)
        else:
            source = point.source
            plugins.skipped.append(Skipped(source.name, source.distribution, verdict.reason))
    return wanted


def _unrivalled(plugins: Plugins, points: list[_Point]) -> list[_Point]:
    """Return the points whose name is theirs alone; a part of the SDK keeps its name anyway."""
    claims = Counter(point.source.name for point in points)
    kept = []
    for point in points:
        rivals = [p.source for p in points if p.source.name == point.source.name]
        if claims[point.source.name] == 1 or _keeps(point.source, rivals):
            kept.append(point)
        else:
            plugins.conflict(point.source, rivals)
    return kept


def _keeps(source: Source, rivals: Iterable[Source]) -> bool:
    """Say whether ``source`` alone among its rivals is a part of the SDK."""
    return [rival for rival in rivals if rival.distribution in STANDARD] == [source]


def _check_metadata(point: _Point) -> Verdict:
    name = point.source.name
    if not (name.isascii() and name.isprintable() and len(name) <= NAME_LIMIT):
        shown = plain_name(name)
        limits = f"printable ASCII of at most {NAME_LIMIT} characters"
        return Verdict.refuse(f"its name is {shown}, must be {limits}")
    verdict = check_requirements(point.distribution)
    module = point.source.value.partition(":")[0].strip()
    if verdict and not point.distribution.owns_module(module):
        return Verdict.refuse(f"its entry point names {module!r}, which is no file of it")
    return verdict


def _examination(point: _Point) -> Task:
    return Task("plugin", {"value": point.source.value, "name": point.source.name})


def _refuse(plugins: Plugins, source: Source, finding: Finding) -> None:
    platforms = tuple((p["name"], p["score"]) for p in finding.facts.get("platforms", ()))
    verdict = finding.verdict
    mend = (
        f"mend or uninstall it, or disable it: INTERPOSER_DISABLE={source.name}; "
        "`interposer doctor --fresh` examines it anew"
    )
    plugins.quarantine(source, verdict.reason, mend, trace=verdict.traceback, platforms=platforms)


def _load(plugins: Plugins, point: _Point) -> None:
    """Import a plugin that was found to be harmless, and take its records."""
    try:
        plugin = load_value(point.source.value)
    except FOREIGN_ERRORS as error:
        plugins.quarantine(point.source, f"its import raised {described(error)}", cause=error)
        return
    verdict = check_api(plugin, in_code=False)
    if verdict:
        plugins.add(point.source, plugin)
    else:
        plugins.quarantine(point.source, verdict.reason)


def _settle_ops(plugins: Plugins) -> None:
    """Quarantine the plugins that define an op which another distribution defines too.

    Kernels are checked against the definition, so nobody may exchange it. A part of the SDK keeps
    its ops; of other plugins none does, as no order among them would be right.
    """
    owners: dict[str, list[Source]] = {}
    for plugin in plugins.loaded:
        for record in plugin.records:
            if isinstance(record, OpEntry):
                owners.setdefault(record.name, []).append(plugin.source)
    for op, sources in sorted(owners.items()):
        if len(sources) == 1:
            continue
        claims = " and by ".join(sorted(source.origin for source in sources))
        for plugin in [p for p in plugins.loaded if p.source in sources]:
            if not _keeps(plugin.source, sources):
                mend = f"disable one of them: INTERPOSER_DISABLE={plugin.distribution}"
                plugins.withdraw(plugin, f"op {op!r} is defined by {claims}", mend)


def _names(point: _Point) -> tuple[str, str]:
    return canonicalize_name(point.source.name), canonicalize_name(point.source.distribution)


def _warn_of_unknown(disabled: Iterable[str], points: list[_Point]) -> None:
    """Warn only: one policy may serve machines that have different plugins installed."""
    known = {name for point in points for name in _names(point)}
    for name in sorted(set(disabled) - known):
        listed = ", ".join(repr(k) for k in nearest_first(name, known)) or "(none)"
        text = f"The configuration disables {name!r}, which is not installed. Installed: {listed}."
        warnings.warn(text, PluginWarning, stacklevel=3)
