"""The verification of all records of a distribution on a device of this machine."""

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
"""A function that runs trials, such as ``outcomes``, which uses this process."""

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
    """Test every record of a distribution and return the report.

    Args:
        distribution: name of the distribution; for a plugin registered in code, name of the
            plugin's module.
        registry: registry with the records; the default has all installed plugins.
        device: device to run on; the default is the first device of the selected platform.
        op: verify only kernels of this op.
        case: run only cases with this label.
        platform: platform to run on, if ``device`` is None.
        seed: random seed of the cases.
        quick: run fewer cases per op, in which each tested size, layout and special value occurs.
        date: date of the report in UTC; the default is now.
        progress: called before each trial.
        host: name of an engine whose layers run the kernels; empty runs kernels directly.
        run: function that runs the trials.

    Raises:
        UnknownNameError: the distribution, op, case or host is unknown.
        ConfigError: the configuration excludes the distribution, or the host cannot be loaded.
        PluginError: a plugin of the distribution failed to load.
        PlatformUnavailableError: no device is available.
    """
    config = Config(platform=platform) if platform else Config()
    registry = registry or current_registry(config)
    scope = known_scope(registry, Scope(distribution, op, case, seed, quick, host))
    device = device or place(config).device
    engine = find_host(host).version if host else ""
    start_date = date or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    start = time.perf_counter()
    candidates = examined(run(registry, device, scope, progress), scope, platform)
    tested = [(c.kind, c.subject, c.provider, c.name) for c in candidates]
    # With ``case``, most candidates have no trial, which is no finding.
    without_trials = () if case else absent(registry, device, scope, tested)
    return Report(
        distribution=scope.distribution,
        version=_version(registry, scope.distribution),
        ground=_ground(registry, device),
        date=start_date,
        seed=seed,
        quick=quick,
        op=op,
        case=case,
        host=engine,
        seconds=time.perf_counter() - start,
        candidates=(*candidates, *without_trials),
    )


def known_scope(registry: Registry, scope: Scope) -> Scope:
    """Check the distribution and op of ``scope``, and return ``scope`` with the normalised name.

    Raises: the exceptions of ``verify``.
    """
    scope = replace(scope, distribution=_known_distribution(registry, scope.distribution))
    _check_op(registry, scope)
    return scope


def _known_distribution(registry: Registry, name: str) -> str:
    """Return the normalised name of a distribution, and check that all its plugins loaded."""
    plugins = registry.plugins
    loaded = {plugin.distribution for plugin in plugins.loaded}
    failed = {failure.distribution: failure for failure in plugins.failed}
    skipped = {skipped.distribution: skipped for skipped in plugins.skipped}
    all_names = loaded | failed.keys() | skipped.keys()
    normalised = name if name in all_names else str(canonicalize_name(name))
    if normalised in failed:
        raise failed[normalised].error
    if normalised in loaded:
        return normalised
    if normalised in skipped:
        reason = skipped[normalised].reason
        raise ConfigError(
            f"{normalised} cannot be verified, as its plugin is not in use: {reason}. "
            "Try: change the configuration; `interposer doctor` shows its sources"
        )
    hint = "Is it installed, and does it declare a plugin? `interposer doctor` lists all plugins."
    raise UnknownNameError("distribution", name, all_names, hint)


def _check_op(registry: Registry, scope: Scope) -> None:
    """Raise UnknownNameError if the distribution has no kernel for the op of the scope."""
    ops = [
        name
        for name in registry.subjects("kernel")
        if any(c.provider == scope.distribution for c in registry.candidates("kernel", name))
    ]
    if scope.op and scope.op not in ops:
        raise UnknownNameError("op", scope.op, ops, where=f"of {scope.distribution}")


def absent(
    registry: Registry,
    device: Device,
    scope: Scope,
    tested: Iterable[tuple[str, str, str, str]],
) -> Iterator[Examined]:
    """Yield the candidates of the distribution that no trial tested, with the reason."""
    tested_keys = {_identity(*candidate) for candidate in tested}
    for kind, subject, candidate in declared(registry, scope):
        if _identity(kind, subject, candidate.provider, candidate.name) in tested_keys:
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
    """Return the key of a record; only kernels of different ops can share a name."""
    return (kind, subject, provider, name) if kind == "kernel" else (kind, provider, name)


def declared(registry: Registry, scope: Scope) -> Iterator[tuple[str, str, Candidate]]:
    """Yield (kind, subject, candidate) for the candidates in ``scope``."""
    # An op or a host limits the verification to kernels.
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
