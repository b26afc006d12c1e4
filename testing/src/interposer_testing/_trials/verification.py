"""The verification of one distribution's records, on this machine's device."""

from __future__ import annotations

import platform as machine
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import importlib_metadata
import torch
from packaging.utils import canonicalize_name

from interposer import Candidate, Config, Device, Registry, current_registry, place
from interposer.errors import ConfigError, UnknownNameError
from interposer.tooling import Kind
from interposer_testing._reports.facts import NO_CASE, Examined, Ground
from interposer_testing._reports.report import Report
from interposer_testing._reports.tally import examined
from interposer_testing._trials.host import find_host
from interposer_testing._trials.outcome import Outcome, Progress, Scope, outcomes

Run = Callable[[Registry, Device, Scope, Progress | None], Iterable[Outcome]]
"""A function that runs trials; ``outcomes`` does so in this process."""

_KINDS: tuple[Kind, ...] = ("kernel", "attention", "layer", "scheme", "model", "communicator")


def verify(
    distribution: str,
    *,
    registry: Registry | None = None,
    device: Device | None = None,
    op: str = "",
    case: str = "",
    platform: str = "",
    seed: int = 0,
    quick: bool = False,
    date: str = "",
    progress: Progress | None = None,
    host: str = "",
    run: Run = outcomes,
) -> Report:
    """Return the report on every record of a distribution.

    Args:
        distribution: its name; of a plugin that was given in code, the name of its module.
        registry: where its records are; without one, the plugins of this installation.
        device: where to run; without one, the first device of the platform in force.
        op: verify only what is declared for this op.
        case: run only cases with this label.
        platform: ask for this platform, where no device is given.
        seed: of the cases.
        quick: try only few cases of each op, among which every value of every axis occurs.
        date: when it is, in UTC, as the report states it; without one, now.
        progress: called before each trial.
        host: name of an engine in whose layers the kernels are tried, instead of by themselves.
        run: what runs the trials.

    Raises:
        UnknownNameError: no plugin of this distribution is installed, none has the op or case, or
            there is no such host.
        ConfigError: the policy leaves the distribution out, or the host cannot be used.
        PluginError: one of its plugins is quarantined, so it is not known what it declares.
        PlatformUnavailableError: there is no device to run on.
    """
    config = Config(platform=platform) if platform else Config()
    registry = registry or current_registry(config)
    scope = known_scope(registry, Scope(distribution, op, case, seed, quick, host))
    device = device or place(config).device
    engine = find_host(host).version if host else ""
    began = date or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    start = time.perf_counter()
    found = examined(run(registry, device, scope, progress), scope, platform)
    tried = [(c.kind, c.subject, c.provider, c.name) for c in found]
    missing = () if case else absent(registry, device, scope, tried)
    return Report(
        distribution=scope.distribution,
        version=_version(registry, scope.distribution),
        ground=_ground(registry, device),
        date=began,
        seed=seed,
        quick=quick,
        op=op,
        case=case,
        host=engine,
        seconds=time.perf_counter() - start,
        candidates=(*found, *missing),
    )


def known_scope(registry: Registry, scope: Scope) -> Scope:
    """Return the scope, with the distribution by the name that the registry knows it by.

    Raises: see ``verify``.
    """
    scope = replace(scope, distribution=_known_distribution(registry, scope.distribution))
    _check_op(registry, scope)
    return scope


def _known_distribution(registry: Registry, name: str) -> str:
    """Return the registry's name of a distribution; all of its plugins must work."""
    plugins = registry.plugins
    known = {plugin.distribution for plugin in plugins.loaded}
    failed = {failure.distribution: failure for failure in plugins.failed}
    skipped = {skipped.distribution: skipped for skipped in plugins.skipped}
    everyone = known | failed.keys() | skipped.keys()
    found = name if name in everyone else str(canonicalize_name(name))
    if found in failed:
        raise failed[found].error
    if found in known:
        return found
    if found in skipped:
        raise ConfigError(
            f"{found} cannot be verified, as its plugin is not in use: {skipped[found].reason}. "
            "Try: change the policy; `interposer doctor` shows which source says so"
        )
    hint = "Is it installed, and does it declare a plugin? `interposer doctor` says what is there."
    raise UnknownNameError("distribution", name, everyone, hint)


def _check_op(registry: Registry, scope: Scope) -> None:
    """Raise UnknownNameError if the distribution declares nothing for the op of the scope."""
    known = [
        name
        for name in registry.subjects("kernel")
        if any(c.provider == scope.distribution for c in registry.candidates("kernel", name))
    ]
    if scope.op and scope.op not in known:
        raise UnknownNameError("op", scope.op, known, where=f"of {scope.distribution}")


def absent(
    registry: Registry,
    device: Device,
    scope: Scope,
    seen: Iterable[tuple[str, str, str, str]],
) -> Iterator[Examined]:
    """Yield what the distribution declares but no trial was of, with the reason."""
    tried = {_identity(*candidate) for candidate in seen}
    for kind, subject, candidate in declared(registry, scope):
        if _identity(kind, subject, candidate.provider, candidate.name) in tried:
            continue
        platform = getattr(candidate.record, "platform", "")
        reason = NO_CASE
        if platform not in registry.runs(device.platform):
            reason = f"needs the platform {platform}, this is {device.platform}"
        yield Examined(
            kind,
            subject,
            candidate.name,
            candidate.provider,
            candidate.version,
            platform,
            absent=reason,
        )


def _identity(kind: str, subject: str, provider: str, name: str) -> tuple[str, ...]:
    """Return the key of a record: only kernels may have a name in common, each for its own op."""
    return (kind, subject, provider, name) if kind == "kernel" else (kind, provider, name)


def declared(registry: Registry, scope: Scope) -> Iterator[tuple[str, str, Candidate]]:
    """Yield the candidates in ``scope``, each with its kind and its subject."""
    for kind in ("kernel",) if scope.op or scope.host else _KINDS:
        subjects = [scope.op] if scope.op else registry.subjects(kind)
        for subject in subjects:
            for candidate in registry.candidates(kind, subject):
                if candidate.provider == scope.distribution:
                    yield kind, subject, candidate


def _version(registry: Registry, distribution: str) -> str:
    plugins = registry.plugins.loaded
    return next(plugin.version for plugin in plugins if plugin.distribution == distribution)


def _ground(registry: Registry, device: Device) -> Ground:
    versions = {"interposer": importlib_metadata.version("interposer")}
    versions |= {plugin.distribution: plugin.version for plugin in registry.plugins.loaded}
    return Ground(
        device=device.name,
        platform=device.platform,
        torch_device=device.torch_device,
        architecture=device.capability.architecture,
        # platform.platform() would start `uname -p`.
        system=f"{machine.system()}-{machine.release()}-{machine.machine()}",
        python=machine.python_version(),
        torch=torch.__version__,
        versions=dict(sorted(versions.items())),
    )
