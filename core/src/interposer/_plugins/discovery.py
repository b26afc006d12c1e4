"""Finds the installed plugins; what cannot be trusted or does not work is quarantined."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.utils import canonicalize_name

from interposer import hookspecs
from interposer._config.config import Config
from interposer._contract.errors import described, foreign_errors, nearest_first, warn
from interposer._contract.lazy_names import import_problem
from interposer._contract.records import OpEntry
from interposer._contract.verdict import Verdict
from interposer._examination.examiner import examine
from interposer._examination.inspection import load_value
from interposer._examination.task import Task
from interposer._plugins.plugins import Plugins, PluginWarning, Skipped, Source
from interposer._plugins.trust import allowed, check_lock
from interposer._validation.compatibility import check_api, check_requirements
from interposer._validation.distribution import Distribution, read_distribution
from interposer._validation.records import NAME_LETTERS, NAME_LIMIT, is_name, plain_name
from interposer_sandbox import Finding, Metadata, metadata_folder
from interposer_sandbox import entry_points as announced

_MOST_PLUGINS = 100


def discover(config: Config | None = None) -> Plugins:
    """Return every installed plugin that the policy lets in, broken ones quarantined.

    Code is imported here only after a child process has done so without harm, or after a
    remembered verdict that it did.

    Raises:
        UnknownNameError: the allow list names a distribution that is not installed.
        LockError: ``config.locked``, and the installed plugins are not the locked ones.
    """
    config = config or Config()
    start = time.time_ns()
    plugins = Plugins()
    found, broken = _installed()
    wanted = _wanted(plugins, [*found, *broken], config)
    for source in wanted:
        if source in broken:
            plugins.quarantine(source, broken[source], "reinstall it, or uninstall it")
    wanted = [source for source in wanted if source not in broken]
    if config.locked:
        check_lock(config, _distributions(wanted))
    sound = []
    for source in _unrivalled(plugins, wanted):
        verdict = _check_metadata(source)
        if verdict:
            sound.append(source)
        else:
            mend = "install a version that fits, or uninstall it"
            plugins.quarantine(source, verdict.reason, mend)
    tasks = {
        source.name: (
            source.installed,
            Task("plugin", {"value": source.value, "name": source.name}),
        )
        for source in sound
        if source.installed is not None and (config.isolation != "off" or not source.standard)
    }
    findings = {name: examine(dist, task, config) for name, (dist, task) in tasks.items()}
    for source in sound:
        finding = findings.get(source.name)
        # The SDK works where nothing can be examined.
        alone = source.standard and finding is not None and "unavailable" in finding.facts
        if finding is None or finding or alone:
            _load(plugins, source)
        else:
            _refuse(plugins, source, finding)
    _settle_ops(plugins)
    plugins.settle()
    for name, (_, task) in tasks.items():
        plugins.tell_probed(name, task, findings[name])
    plugins.observe(
        "interposer_finished",
        activity="discovery",
        subject=hookspecs.GROUP,
        start_ns=start,
        end_ns=time.time_ns(),
        facts={"plugins": len(plugins.loaded), "failed": len(plugins.failed)},
    )
    return plugins


def installed_distributions() -> list[Distribution]:
    """Return the distributions that provide plugins, by name."""
    return _distributions(_installed()[0])


def entry_points(group: str) -> list[importlib_metadata.EntryPoint]:
    """Return the entry points of a group, in no order; what cannot be used announces none."""
    found: list[importlib_metadata.EntryPoint] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        folder = _folder(distribution)
        if folder not in seen:  # of two of one name the first on the path counts
            seen.add(folder)
            found += _entries(distribution, group)[0]
    return found


def _installed() -> tuple[list[Source], dict[Source, str]]:
    """Return all entry points, and what cannot be used of the distributions with the reasons.

    The order does not depend on that of the installation. Of two distributions of one name the
    first on the path counts, as for imports; the other is told of.
    """
    sources: dict[tuple[str, ...], Source] = {}
    broken = {}
    seen: dict[str, Metadata] = {}
    for found in importlib_metadata.distributions():
        first = seen.setdefault(_folder(found), found)
        entries, fault = _entries(found)
        if not entries and not fault:
            continue
        distribution = read_distribution(found)
        if first is not found:
            fault = "" if _is_beside(first, found) else _rivalry(first, distribution)
            entries = []
        if fault:
            broken[_source(distribution)] = fault
        for entry in entries:
            place = (entry.name, distribution.name, distribution.location, entry.value)
            sources[place] = _source(distribution, entry.name, entry.value)
    return [sources[place] for place in sorted(sources)], broken


def _entries(found: Any, group: str = hookspecs.GROUP) -> tuple[list[Any], str]:
    """Return the entry points of a group, or none of them and what is wrong with the file."""
    entries, fault = announced(found, group)
    if len(entries) > _MOST_PLUGINS:
        return [], f"it announces {len(entries):,} plugins; {_MOST_PLUGINS} are allowed"
    return entries, fault


def _is_beside(first: Metadata, other: Metadata) -> bool:
    """Say whether the path leads to one folder twice, or into source code that can be edited.

    Build tools leave metadata there besides those of the installation.
    """
    one, two = metadata_folder(first).resolve(), metadata_folder(other).resolve()
    editable = two.suffix == ".egg-info" and read_distribution(first).editable
    return one == two or (editable and Path(read_distribution(first).location) == two.parent)


def _rivalry(first: Metadata, other: Distribution) -> str:
    """Return the reason not to use a distribution whose name another has already."""
    used = read_distribution(first)
    return (
        f"there are two distributions of the name {other.name!r} on the path: {used.version} in "
        f"{used.location}, which is used, and {other.version} in {other.location}"
    )


def _source(distribution: Distribution, name: str = "", value: str = "") -> Source:
    provider = distribution.name
    return Source(name or provider, provider, distribution.version, distribution, value)


def _folder(found: Metadata) -> str:
    """Return the normalized name of a distribution, taken from its metadata folder."""
    # Reading the name from the metadata takes ten times as long.
    return canonicalize_name(metadata_folder(found).stem.partition("-")[0])


def _distributions(sources: Iterable[Source]) -> list[Distribution]:
    every = (source.installed for source in sources)
    found = {(d.name, d.location): d for d in every if d is not None}
    return [found[key] for key in sorted(found)]


def _wanted(plugins: Plugins, sources: list[Source], config: Config) -> list[Source]:
    """Return the sources that the policy lets in; the others are noted as skipped."""
    disabled = {str(canonicalize_name(name)) for name in config.disable}
    names = {
        source: {*map(canonicalize_name, (source.name, source.distribution))} for source in sources
    }
    _warn_of_unknown(disabled, {name for some in names.values() for name in some})
    verdicts = allowed(config, _distributions(sources))
    wanted = []
    for source in sources:
        verdict = verdicts[source.distribution]
        if not disabled.isdisjoint(names[source]):
            verdict = Verdict.refuse("disabled by the configuration")
        if verdict:
            wanted.append(source)
        else:
            plugins.skipped.append(Skipped(source.name, source.distribution, verdict.reason))
    return wanted


def _warn_of_unknown(disabled: set[str], known: Iterable[str]) -> None:
    """Warn only: one policy may serve machines that have different plugins installed."""
    for name in sorted(disabled.difference(known)):
        listed = ", ".join(repr(k) for k in nearest_first(name, known)) or "(none)"
        text = f"The configuration disables {name!r}, which is not installed. Installed: {listed}."
        warn(text, PluginWarning)


def _unrivalled(plugins: Plugins, sources: list[Source]) -> list[Source]:
    """Return the sources whose name is theirs alone; a part of the SDK keeps its name anyway."""
    kept = []
    for source in sources:
        rivals = [other for other in sources if other.name == source.name]
        if _keeps(source, rivals):
            kept.append(source)
        else:
            plugins.conflict(source, rivals)
    return kept


def _keeps(source: Source, rivals: Sequence[Source]) -> bool:
    """Say whether ``source`` has no rivals, or is alone among them a part of the SDK."""
    return len(rivals) == 1 or [rival for rival in rivals if rival.standard] == [source]


def _check_metadata(source: Source) -> Verdict:
    name, distribution = source.name, source.installed
    if not is_name(name):
        limits = f"at most {NAME_LIMIT} characters out of {NAME_LETTERS}"
        return Verdict.refuse(f"its name is {plain_name(name)}, must be {limits}")
    if distribution is None:
        return Verdict.accept()
    verdict = check_requirements(distribution)
    module = source.value.partition(":")[0].strip()
    if verdict and not distribution.owns_module(module):
        return Verdict.refuse(f"its entry point names {module!r}, which is no file of it")
    return verdict


def _refuse(plugins: Plugins, source: Source, finding: Finding) -> None:
    platforms = tuple((p["name"], p["score"]) for p in finding.facts.get("platforms", ()))
    mend = (
        f"mend or uninstall it, or disable it: {source.disabling}; "
        "`interposer doctor --fresh` examines it anew"
    )
    plugins.quarantine(source, finding.reason, mend, trace=finding.traceback, platforms=platforms)


def _load(plugins: Plugins, source: Source) -> None:
    """Import a plugin that was found to be harmless, and take its records."""
    try:
        plugin = load_value(source.value)
    except foreign_errors() as error:
        reason = f"its import raised {described(error)}"
        if problem := import_problem(error):
            reason += f"; {problem}"
        plugins.quarantine(source, reason, cause=error)
        return
    verdict = check_api(plugin, in_code=False)
    if verdict:
        plugins.add(source, plugin)
    else:
        plugins.quarantine(source, verdict.reason)


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
        claims = " and by ".join(sorted(source.origin for source in sources))
        for plugin in [p for p in plugins.loaded if p.source in sources]:
            if not _keeps(plugin.source, sources):
                mend = f"disable one of them: INTERPOSER_DISABLE={plugin.distribution}"
                plugins.withdraw(plugin, f"op {op!r} is defined by {claims}", mend)
