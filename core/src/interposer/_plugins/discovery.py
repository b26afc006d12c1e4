"""Discovery of the installed plugins; untrusted or broken plugins are quarantined."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.utils import canonicalize_name

from interposer import hookspecs
from interposer._config.config import Config
from interposer._contract.errors import described, foreign_errors, near_names, warn
from interposer._contract.lazy_names import import_problem
from interposer._contract.records import OpEntry
from interposer._contract.verdict import Verdict
from interposer._examination.examiner import examine, prepare
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
    """Load every installed plugin that the policy allows; broken plugins are quarantined.

    Code is imported here only after a child process has imported the same code without harm, now or
    earlier with a remembered verdict.

    Raises:
        UnknownNameError: the allow list names a distribution that is not installed.
        LockError: ``config.locked``, and the installed plugins differ from the lock file.
    """
    config = config or Config()
    start = time.time_ns()
    plugins = Plugins()
    usable, broken = _find_sources()
    allowed_sources = _filter_sources(plugins, [*usable, *broken], config)
    for source in allowed_sources:
        if source in broken:
            plugins.quarantine(source, broken[source], "reinstall it, or uninstall it")
    allowed_sources = [source for source in allowed_sources if source not in broken]
    if config.locked:
        check_lock(config, _distributions(allowed_sources))
    sound = []
    # Names are compared before any code runs, so that a plugin cannot replace another.
    for source in _resolve_name_conflicts(plugins, allowed_sources):
        verdict = _check_metadata(source)
        if verdict:
            sound.append(source)
        else:
            remedy = "install a version that fits, or uninstall it"
            plugins.quarantine(source, verdict.reason, remedy)
    tasks = {
        source.name: (
            source.installed,
            Task("plugin", {"value": source.value, "name": source.name}),
        )
        for source in sound
        if source.installed is not None and (config.isolation != "off" or not source.standard)
    }
    prepare(tasks.values(), config)
    findings = {name: examine(dist, task, config) for name, (dist, task) in tasks.items()}
    for source in sound:
        finding = findings.get(source.name)
        # Parts of the SDK are loaded even if no process can examine them.
        is_unexaminable = source.standard and finding is not None and "unavailable" in finding.facts
        if finding is None or finding or is_unexaminable:
            _load(plugins, source)
        else:
            _quarantine_refused(plugins, source, finding)
    _resolve_op_conflicts(plugins)
    plugins.settle()
    for name, (_, task) in tasks.items():
        plugins.observe_examination(name, task, findings[name])
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
    return _distributions(_find_sources()[0])


def entry_points(group: str) -> list[importlib_metadata.EntryPoint]:
    """Return the entry points of a group, unordered; unusable distributions have none."""
    points: list[importlib_metadata.EntryPoint] = []
    names: set[str] = set()
    for distribution in importlib_metadata.distributions():
        folder = _folder(distribution)
        if folder not in names:  # the first distribution of a name on the path counts
            names.add(folder)
            points += _read_entry_points(distribution, group)[0]
    return points


def _find_sources() -> tuple[list[Source], dict[Source, str]]:
    """Return the source of every entry point, and the unusable sources with reasons.

    The order is independent of the order of installation. Of two distributions of one name, the
    first on the path counts, as for imports; the other is reported as unusable.
    """
    sources: dict[tuple[str, ...], Source] = {}
    broken = {}
    first_by_folder: dict[str, Metadata] = {}
    for metadata in importlib_metadata.distributions():
        first = first_by_folder.setdefault(_folder(metadata), metadata)
        entries, fault = _read_entry_points(metadata)
        if not entries and not fault:
            continue
        distribution = read_distribution(metadata)
        if first is not metadata:
            fault = (
                ""
                if _is_same_installation(first, metadata)
                else _describe_duplicate(first, distribution)
            )
            entries = []
        if fault:
            broken[_source(distribution)] = fault
        for entry in entries:
            place = (entry.name, distribution.name, distribution.location, entry.value)
            sources[place] = _source(distribution, entry.name, entry.value)
    # Sorted, because the order of distributions on the path is arbitrary.
    return [sources[place] for place in sorted(sources)], broken


def _read_entry_points(metadata: Any, group: str = hookspecs.GROUP) -> tuple[list[Any], str]:
    """Return the entry points of a group, or none and the fault of the file."""
    entries, fault = announced(metadata, group)
    if len(entries) > _MOST_PLUGINS:
        return [], f"it announces {len(entries):,} plugins; {_MOST_PLUGINS} are allowed"
    return entries, fault


def _is_same_installation(first: Metadata, second: Metadata) -> bool:
    """Tell whether two metadata folders describe one installation, such as an editable install.

    Build tools leave metadata in such source code next to the metadata of the installation.
    """
    first_folder, second_folder = (
        metadata_folder(first).resolve(),
        metadata_folder(second).resolve(),
    )
    editable = second_folder.suffix == ".egg-info" and read_distribution(first).editable
    return first_folder == second_folder or (
        editable and Path(read_distribution(first).location) == second_folder.parent
    )


def _describe_duplicate(first: Metadata, duplicate: Distribution) -> str:
    """Describe the conflict of a distribution with an earlier one of the same name."""
    first_facts = read_distribution(first)
    return (
        f"there are two distributions of the name {duplicate.name!r} on the path: "
        f"{first_facts.version} in {first_facts.location}, which is used, and "
        f"{duplicate.version} in {duplicate.location}"
    )


def _source(distribution: Distribution, name: str = "", value: str = "") -> Source:
    provider = distribution.name
    return Source(name or provider, provider, distribution.version, distribution, value)


def _folder(metadata: Metadata) -> str:
    """Return the normalized name of a distribution, taken from the metadata folder."""
    # Reading the name from the metadata takes ten times as long.
    return canonicalize_name(metadata_folder(metadata).stem.partition("-")[0])


def _distributions(sources: Iterable[Source]) -> list[Distribution]:
    distributions = (source.installed for source in sources)
    by_key = {(d.name, d.location): d for d in distributions if d is not None}
    return [by_key[key] for key in sorted(by_key)]


def _filter_sources(plugins: Plugins, sources: list[Source], config: Config) -> list[Source]:
    """Return the sources that the policy allows; record the others as skipped."""
    disabled = {str(canonicalize_name(name)) for name in config.disable}
    names = {
        source: {*map(canonicalize_name, (source.name, source.distribution))} for source in sources
    }
    _warn_of_unknown(disabled, {name for source_names in names.values() for name in source_names})
    verdicts = allowed(config, _distributions(sources))
    allowed_sources = []
    for source in sources:
        verdict = verdicts[source.distribution]
        if not disabled.isdisjoint(names[source]):
            verdict = Verdict.refuse("disabled by the configuration")
        if verdict:
            allowed_sources.append(source)
        else:
            plugins.skipped.append(Skipped(source.name, source.distribution, verdict.reason))
    return allowed_sources


def _warn_of_unknown(disabled: set[str], installed_names: Iterable[str]) -> None:
    """Warn about disabled plugins that are not installed."""
    for name in sorted(disabled.difference(installed_names)):
        text = (
            f"The configuration disables {name!r}, which is not installed. Installed, nearest "
            f"first: {near_names(name, installed_names)}."
        )
        warn(text, PluginWarning)


def _resolve_name_conflicts(plugins: Plugins, sources: list[Source]) -> list[Source]:
    """Return the sources with a unique name, and quarantine the others.

    If two plugins claim a name, a part of the SDK keeps the name.
    """
    unique_sources = []
    for source in sources:
        rivals = [rival for rival in sources if rival.name == source.name]
        if _keeps_claim(source, rivals):
            unique_sources.append(source)
        else:
            plugins.conflict(source, rivals)
    return unique_sources


def _keeps_claim(source: Source, rivals: Sequence[Source]) -> bool:
    """Tell whether ``source`` has no rivals, or is the only part of the SDK among the rivals."""
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


def _quarantine_refused(plugins: Plugins, source: Source, finding: Finding) -> None:
    platforms = tuple((p["name"], p["score"]) for p in finding.facts.get("platforms", ()))
    remedy = (
        f"fix or uninstall it, or disable it: {source.disabling}; "
        "`interposer doctor --fresh` examines it again"
    )
    if "did not return within" in finding.reason:
        # A busy machine can starve a plugin that is in order.
        remedy = (
            "run this again if the machine was busy, or write probe_seconds = 60 into "
            f"interposer.toml; {remedy}"
        )
    plugins.quarantine(source, finding.reason, remedy, trace=finding.traceback, platforms=platforms)


def _load(plugins: Plugins, source: Source) -> None:
    """Import a plugin that passed the examination, and take the records."""
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


def _resolve_op_conflicts(plugins: Plugins) -> None:
    """Quarantine the plugins that define an op which another distribution defines too.

    Kernels are checked against the definition, so no other plugin may replace a definition. A part
    of the SDK keeps an op; other rivals are all quarantined, because no order would be right.
    """
    owners: dict[str, list[Source]] = {}
    for plugin in plugins.loaded:
        for record in plugin.records:
            if isinstance(record, OpEntry):
                owners.setdefault(record.name, []).append(plugin.source)
    for op, sources in sorted(owners.items()):
        claims = " and by ".join(sorted(source.origin for source in sources))
        for plugin in [p for p in plugins.loaded if p.source in sources]:
            if not _keeps_claim(plugin.source, sources):
                remedy = f"disable one of them: INTERPOSER_DISABLE={plugin.distribution}"
                plugins.withdraw(plugin, f"op {op!r} is defined by {claims}", remedy)
