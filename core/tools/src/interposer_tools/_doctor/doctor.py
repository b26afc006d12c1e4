"""The examination of an installation for ``interposer doctor``."""

from __future__ import annotations

import os
import platform as machine
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata
import torch

from interposer import (
    API_VERSION,
    Config,
    Registry,
    Request,
    Rule,
    current_registry,
    effective_config,
    place,
)
from interposer.errors import (
    ConfigError,
    InterposerError,
    StorageError,
    UnknownNameError,
    described,
    foreign_errors,
)
from interposer.tooling import (
    Kind,
    Store,
    check_lock,
    config_sources,
    default_store,
    forget_discovery,
    installed_distributions,
    lock_path,
    policy_for,
    strays,
    unless_explicit,
)
from interposer_testing.described import DeviceDescription
from interposer_tools._doctor.health import (
    Cache,
    Health,
    InstalledPlugin,
    PolicySource,
    ProbedPlatform,
    Problem,
)
from interposer_tools._doctor.hub_decorators import SUBJECT, judge_hub_decorators

_RULES: dict[str, Kind] = {
    "kernels": "kernel",
    "layers": "layer",
    "attention": "attention",
    "quantization": "scheme",
    "models": "model",
    "communicators": "communicator",
}
_GRAPHS = {
    "auto": "used for decode steps if every selected kernel is safe in a graph",
    "on": "required for decode steps: graphs = 'on'",
    "off": "not used: graphs = 'off'",
}


def doctor(config: Config | None = None, *, fresh: bool = False) -> Health:
    """Examine the installation; every failure becomes a problem in the result.

    Args:
        config: configuration that overrides all other sources.
        fresh: examine all plugins again instead of using stored verdicts.
    """
    health = Health(_versions(), _torch())
    try:
        policy = effective_config(config)
        sources = config_sources(config)
    except ConfigError as error:
        health.problems.append(Problem("configuration", str(error), "correct that source"))
        return health
    health.sources = [PolicySource(s.name, s.path, s.fields) for s in sources if s.fields or s.path]
    store = default_store(policy)
    if fresh:
        _forget(health, store)
    if _examine_lock(health, policy) or not policy.locked:
        # Show plugins that ``strict`` would forbid, but never run code that the lock refuses.
        _examine_code(health, policy.model_copy(update={"strict": False}))
    _examine_cache(health, store)
    return health


def _examine_code(health: Health, config: Config) -> None:
    # Recorded, because the report shows warnings once and without source lines.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            registry = current_registry(config)
        except InterposerError as error:
            health.problems.append(Problem("plugins", str(error)))
        else:
            _examine_platforms(health, registry, config)
            _examine_plugins(health, registry)
            _examine_rules(health, registry, config)
            decorators = judge_hub_decorators()
            if decorators is not None:
                health.machine[SUBJECT] = decorators.reason
            # Failures are reported as problems already; ``dict`` removes repeated warnings.
            failures = {str(failure.error) for failure in registry.plugins.failed}
            texts = dict.fromkeys(str(warning.message) for warning in caught)
            health.warnings += [text for text in texts if text not in failures]


def _versions() -> dict[str, str]:
    return {
        "interposer": importlib_metadata.version("interposer"),
        "api": API_VERSION,
        "python": machine.python_version(),
        "system": machine.platform(),
    }


def _torch() -> dict[str, Any]:
    # The accelerator that torch was built for. The platforms report the devices instead of torch:
    # torch may initialise the driver to count devices, and a process with an initialised driver
    # cannot be forked into processes that use the device.
    accelerator = torch.accelerator.current_accelerator()
    # The toolkits (cuda, hip, ...) differ between builds; ``__all__`` lists them.
    build = {n: getattr(torch.version, n) for n in torch.version.__all__ if n != "__version__"}
    return {
        "version": torch.__version__,
        "accelerator": None if accelerator is None else accelerator.type,
        "threads": torch.get_num_threads(),
        "build": {name: value for name, value in build.items() if value},
    }


def _forget(health: Health, store: Store) -> None:
    try:
        store.clear("verdicts")
        forget_discovery()
    except StorageError as error:
        health.problems.append(Problem("cache", error.reason, f"remove {error.path}"))


def _examine_cache(health: Health, store: Store) -> None:
    reason = _unusable(store.folder)
    if reason:
        remedy = "set cache_dir or INTERPOSER_CACHE_DIR to a folder that can be written"
        health.problems.append(Problem(f"cache {store.folder}", reason, remedy))
    entries = {}
    for kind in store.kinds():
        stored = list(store.entries(kind))
        entries[kind] = len(stored)
        health.problems += [
            Problem(f"cache entry {entry.path}", entry.problem, "remove it; it will be rebuilt")
            for entry in stored
            if entry.problem
        ]
    health.cache = Cache(str(store.folder), entries)


def _unusable(folder: Path) -> str:
    """Return the reason why ``folder`` cannot be created or written to, or ""."""
    try:
        existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        if not existing.is_dir():
            return f"{existing} is no folder"
    except OSError as error:
        return f"it cannot be read: {error}"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def _examine_lock(health: Health, config: Config) -> bool:
    """Return whether the installed plugins match the lock file; False without a lock file."""
    path = lock_path(config)
    if not (config.locked or path.exists()):
        return False
    try:
        check_lock(config, installed_distributions())
    except ConfigError as error:
        health.lock = f"{path}: not as locked"
        if config.locked:
            health.lock += ", so no plugin was loaded"
            health.problems.append(Problem("lock", str(error)))
        else:
            health.warnings.append(str(error))
        return False
    health.lock = f"{path}: as locked"
    return True


def _examine_platforms(health: Health, registry: Registry, config: Config) -> None:
    request = Request("platform", "")
    policy = policy_for(config, request)
    for candidate in registry.candidates("platform"):
        verdict = unless_explicit(candidate, policy).judge(request)
        health.platforms.append(
            ProbedPlatform(
                candidate.name,
                candidate.provider,
                candidate.version,
                candidate.score,
                verdict.accepted,
                verdict.reason,
                sorted(registry.runs(candidate.name) - {"", candidate.name}),
            )
        )
        if verdict.traceback:
            remedy = f"fix, reinstall or uninstall {candidate.provider}"
            subject = f"platform {candidate.name!r} of {candidate.origin}"
            health.problems.append(Problem(subject, verdict.reason, remedy, verdict.traceback))
    try:
        placement = place(config)
        health.device = DeviceDescription.of(placement).model_dump(mode="json")
    except InterposerError as error:
        health.problems.append(Problem("device", str(error)))
        return
    platform = placement.platform
    if platform.provides("capture_graph"):
        health.machine["graphs"] = _GRAPHS[config.graphs]
    if not platform.provides("facts"):
        return
    try:
        health.machine |= platform.facts()
    except foreign_errors() as error:
        subject = f"facts of platform {platform.name!r}"
        remedy = f"fix or reinstall {placement.choice.chosen.provider}"
        reason = described(error)
        health.problems.append(Problem(subject, reason, remedy, traceback.format_exc()))


def _examine_plugins(health: Health, registry: Registry) -> None:
    plugins = registry.plugins
    health.warnings += [stray.said for stray in strays(registry)]
    health.plugins = [
        InstalledPlugin(p.name, p.distribution, p.version, p.summary(), [*p.hooks])
        for p in plugins.loaded
    ]
    health.skipped = [*plugins.skipped]
    health.problems += [
        Problem(
            f"plugin {failure.name!r} of {failure.distribution} {failure.version}",
            failure.error.reason,
            failure.error.mend,
            failure.traceback,
        )
        for failure in plugins.failed
    ]


def _examine_rules(health: Health, registry: Registry, config: Config) -> None:
    remedy = "correct the setting in its source, or install the plugin with that name"
    try:
        registry.check_rules(config)
    except ConfigError as error:
        health.problems.append(Problem("configuration", str(error), remedy))
        return
    wrong = _wrong_pins(registry, config)
    health.problems += [Problem("configuration", str(error), remedy) for error in wrong]


def _wrong_pins(registry: Registry, config: Config) -> Iterator[UnknownNameError]:
    """Yield an error for every pin in the configuration that names no candidate."""
    for field_name, kind in _RULES.items():
        rules: Mapping[str, Rule] = getattr(config, field_name)
        for key, rule in rules.items():
            name = key.partition("@")[0]  # the part after "@" restricts the rule to some layers
            subjects = registry.subjects(kind) if name == "*" else [name]
            if kind == "attention":  # backends have no subject, they accept or refuse by spec
                subjects = [""]
            candidates = [c for subject in subjects for c in registry.candidates(kind, subject)]
            names = {c.name for c in candidates}
            qualified_names = {c.qualified_name for c in candidates}
            if rule.pin is not None and rule.pin not in names | qualified_names:
                where = f"for {name!r} in Config.{field_name}"
                yield UnknownNameError(kind, rule.pin, names, where=where)
