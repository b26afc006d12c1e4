"""The current platform and device, and plans of models for the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from interposer._config.config import Config, effective_config
from interposer._config.policy import Policy, policy_for
from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Choice
from interposer._contract.errors import (
    ConfigError,
    NoCandidateError,
    PlatformUnavailableError,
    UnknownNameError,
    described,
    foreign_errors,
    install_command,
    near_names,
    traced,
)
from interposer._contract.platform import Placement, Platform
from interposer._contract.records import PlatformEntry
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._plugins.registry import Registry, current_registry, per_registry
from interposer._selection.resolver import Resolver
from interposer._selection.select import select

_REQUEST = Request("platform", "")


def current_platform(config: Config | None = None) -> Platform:
    """Return the current platform; repeated calls with the same configuration are cheap.

    Raises:
        PlatformUnavailableError: no platform accepts this machine, the pinned platform refuses, or
            a platform failed that might have ranked higher.
        UnknownNameError: no installed plugin has the pinned platform.
    """
    return place(config).platform


def place(config: Config | None = None) -> Placement:
    """Choose the platform and its first device; see ``current_platform`` for the errors."""
    config = effective_config(config)
    return _place(current_registry(config), policy_for(config, _REQUEST))


@per_registry
def _place(registry: Registry, policy: Policy) -> Placement:
    candidates = [unless_explicit(c, policy) for c in registry.candidates("platform")]
    failures = registry.plugins.refusals()
    # Without this case, the error would say that every platform refuses, although none was tried.
    if policy.pin is None and all(_is_explicit(candidate) for candidate in candidates):
        refusals = [Refusal(c.name, c.origin, c.judge(_REQUEST).reason) for c in candidates]
        omitted = registry.plugins.omissions()
        action = install_command("interposer-cpu")
        if failures or omitted:
            action = (
                "fix the plugins that failed, allow those that the configuration omits, or "
                f"{action}"
            )
        raise PlatformUnavailableError("platform", (*refusals, *failures, *omitted), action)
    requested = f"platform {policy.pin!r}"
    try:
        choice = select(_REQUEST, candidates, policy)
    except UnknownNameError as error:
        if not failures:
            hint = platform_hint(registry, error.name) or error.hint
            raise UnknownNameError(error.kind, error.name, error.known, hint) from None
        # The plugin that provides the platform may be among the plugins that failed.
        what = f"{requested}; known, nearest first: {near_names(error.name, error.known)}"
        raise PlatformUnavailableError(what, failures, "fix the plugins that failed") from error
    except NoCandidateError as error:
        raise PlatformUnavailableError(
            "usable platform" if policy.pin is None else f"{requested}, which was requested",
            (*error.refusals, *failures),
            error.action
            or "install a plugin for this machine; `interposer doctor` lists the installed ones",
        ) from error
    placement = _open(registry, choice)
    if policy.pin is None:
        _refuse_silent_fallback(registry, placement, failures)
    return placement


def platform_hint(registry: Registry, platform: str) -> str:
    """Return the next action for a platform that no plugin in use provides.

    The text is empty for a name that looks like a misspelt one.
    """
    known = [candidate.name for candidate in registry.candidates("platform")]
    if get_close_matches(platform, known) or not platform.isidentifier():
        return ""
    package = f"interposer-{platform}"
    remedy = registry.plugins.remedy(package)
    return f"A platform comes with a package of its own, and {package} {remedy}"


def unless_explicit(candidate: Candidate, policy: Policy) -> Candidate:
    """Make a platform that must be named explicitly refuse every request, unless pinned."""
    is_pinned = policy.pin in (candidate.name, candidate.qualified_name)
    if is_pinned or not _is_explicit(candidate):
        return candidate
    reason = f"is used only if you name it: Config(platform={candidate.name!r})"
    return replace(candidate, judge=lambda _: Verdict.refuse(reason))


def _is_explicit(candidate: Candidate) -> bool:
    assert isinstance(candidate.record, PlatformEntry)
    return candidate.record.explicit


def _open(registry: Registry, choice: Choice) -> Placement:
    """Create the chosen platform and query its first device.

    Raises: PlatformUnavailableError: the platform raises, or lists no device.
    """
    chosen = choice.chosen
    assert isinstance(chosen.record, PlatformEntry)
    try:
        platform: Platform = registry.load(chosen, chosen.record.target)()
        device = platform.devices()[0]
        if not isinstance(device, Device):
            raise TypeError(f"devices() lists {device!r:.100}, which is no Device")
    except foreign_errors() as error:
        failure = f"accepted this machine, but lists no device: {described(error)}"
        raise PlatformUnavailableError(
            f"device on platform {chosen.name!r}",
            [Refusal(chosen.name, chosen.origin, failure, traced(error))],
            f"fix or reinstall {chosen.provider}, or set INTERPOSER_PLATFORM to another platform",
        ) from error
    return Placement(platform, device, choice)


def _refuse_silent_fallback(
    registry: Registry, placement: Placement, plugin_failures: list[Refusal]
) -> None:
    """Raise if a failed platform or plugin would have ranked at least as high as the choice."""
    chosen = placement.choice.chosen
    candidates = registry.candidates("platform")
    # Only a platform that would have ranked at least as high makes the choice a fallback.
    better = {(c.name, c.origin) for c in candidates if c.score >= chosen.score}
    failures = [
        refusal
        for refusal in placement.choice.refusals
        # A traceback marks a crash. A platform that merely finds no device has none.
        if refusal.traceback and (refusal.candidate, refusal.provider) in better
    ]
    failed_origins = [
        f"{f.distribution} {f.version}"
        for f in registry.plugins.failed
        if any(score >= chosen.score for _, score in f.platforms)
    ]
    failures += [refusal for refusal in plugin_failures if refusal.provider in failed_origins]
    # Query torch only after a failure, because the query may initialise the driver.
    if plugin_failures:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type != placement.platform.device_type:
            failures += [refusal for refusal in plugin_failures if refusal not in failures]
    if failures:
        raise PlatformUnavailableError(
            f"automatic platform: {chosen.name!r} would be a silent fallback after failures",
            failures,
            f"fix the failed plugins, or choose the fallback: INTERPOSER_PLATFORM={chosen.name}",
        )


@runtime_checkable
class Planned(Protocol):
    """A model or the plan of a model, with the resolver that made its choices."""

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices."""
        ...

    @property
    def placement(self) -> Placement:
        """The platform and device that the object was built for."""
        ...

    @property
    def path(self) -> Path:
        """The directory of the checkpoint."""
        ...


def planned(
    model: str | os.PathLike[str] | Planned,
    config: Config | None = None,
    dtype: str = "auto",
    placement: Placement | None = None,
    quantization: str | Mapping[str, Any] | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: Any = None,
) -> Planned:
    """Plan a model directory; a model that is already built is returned as its own plan.

    Args:
        model: a directory that an installed plugin can read, or a result of ``load`` or ``plan``.
        config: policy for the plan, which precedes every other source.
        dtype: to compute in, such as ``"bfloat16"``.
        placement: the target of the plan, instead of this machine; a built model is planned anew.
        quantization: the method for quantizing unquantized weights at load time, or the settings of
            a method; None for a built model keeps the model's method.
        tensor_parallel: the number of processes that compute the model together.
        expert_parallel: the expert parallelism, in the form that the planner takes.
    Raises: ConfigError: no installed plugin can plan ``model``.
    """
    if isinstance(model, str | os.PathLike):
        path = Path(model)
    # A built model is its own plan, unless it is planned for another device or number of ranks.
    elif placement is None and tensor_parallel is None and isinstance(model, Planned):
        return model
    elif isinstance(getattr(model, "path", None), Path):
        path = model.path
        if quantization is None:
            quantization = getattr(model, "quantization", None)
    else:
        raise ConfigError(
            f"{model!r} is neither a model directory nor a model. "
            "Try: a path, or what interposer_engine.load returned"
        )
    config = effective_config(config)
    plugins = current_registry(config).plugins
    parallel = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
    options = {"quantization": quantization, **parallel}
    plan, plugin = plugins.first_result(
        "interposer_plan",
        [name for name, value in options.items() if value is not None],
        path=path,
        config=config,
        dtype=dtype,
        placement=placement,
        **options,
    )
    if plan is not None and not isinstance(plan, Planned):
        raise ConfigError(
            f"The plugin {plugin!r} planned {str(path)!r} as {type(plan).__name__}, "
            f"which lacks a resolver, a placement or a path. Try: INTERPOSER_DISABLE={plugin}"
        )
    if plan is None:
        by = "" if quantization is None else f" and quantizes it by {quantization!r}"
        raise ConfigError(
            f"No installed plugin reads the model directory {str(path)!r}{by}. "
            f"Try: {install_command('interposer-engine')}"
        )
    return plan
