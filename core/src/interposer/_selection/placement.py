"""Where to run: the platform in force and its device, chosen like everything else."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch

from interposer._config.config import Config, effective_config
from interposer._config.policy import Policy, policy_for
from interposer._contract.choice import Candidate, Choice
from interposer._contract.errors import (
    FOREIGN_ERRORS,
    NoCandidateError,
    PlatformUnavailableError,
    UnknownNameError,
    described,
)
from interposer._contract.platform import Placement, Platform
from interposer._contract.records import PlatformEntry
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._plugins.registration import per_registry
from interposer._plugins.registry import Registry, current_registry
from interposer._selection.select import select

_REQUEST = Request("platform", "")


def current_platform(config: Config | None = None) -> Platform:
    """Return the platform in force; asking again for the same configuration is cheap.

    Raises:
        PlatformUnavailableError: none accepts, the pinned one refuses, or a platform failed that
            might have been the better one.
        UnknownNameError: no installed plugin has the pinned one.
    """
    return place(config).platform


def place(config: Config | None = None) -> Placement:
    """Return the platform in force with its first device, see ``current_platform``."""
    config = effective_config(config)
    return _place(current_registry(config), policy_for(config, _REQUEST))


@per_registry
def _place(registry: Registry, policy: Policy) -> Placement:
    candidates = [unless_explicit(c, policy) for c in registry.candidates("platform")]
    failures = registry.plugins.refusals()
    if policy.pin is None and all(_is_explicit(candidate) for candidate in candidates):
        refusals = [Refusal(c.name, c.origin, c.judge(_REQUEST).reason) for c in candidates]
        omitted = registry.plugins.omissions()
        action = "pip install interposer-cpu"
        if failures or omitted:
            action = f"mend what failed, allow what the configuration leaves out, or {action}"
        raise PlatformUnavailableError("platform", (*refusals, *failures, *omitted), action)
    asked = f"platform {policy.pin!r}"
    try:
        choice = select(_REQUEST, candidates, policy)
    except UnknownNameError as error:
        if not failures:
            raise
        # The plugin that would provide it may be among those that failed.
        what = f"{asked}; known: {', '.join(error.known)}"
        raise PlatformUnavailableError(what, failures, "mend what failed") from error
    except NoCandidateError as error:
        raise PlatformUnavailableError(
            "usable platform" if policy.pin is None else f"{asked}, which was asked for",
            (*error.refusals, *failures),
            error.action
            or "install a plugin for this machine; `interposer doctor` lists what is there",
        ) from error
    placement = _opened(registry, choice)
    if policy.pin is None:
        _refuse_silent_fallback(registry, placement, failures)
    return placement


def unless_explicit(candidate: Candidate, policy: Policy) -> Candidate:
    """Return ``candidate``, which refuses unprobed where it has to be named and is not."""
    named = policy.pin in (candidate.name, candidate.qualified_name)
    if named or not _is_explicit(candidate):
        return candidate
    reason = f"is taken only where it is named: Config(platform={candidate.name!r})"
    return replace(candidate, judge=lambda _: Verdict.refuse(reason))


def _is_explicit(candidate: Candidate) -> bool:
    assert isinstance(candidate.record, PlatformEntry)
    return candidate.record.explicit


def _opened(registry: Registry, choice: Choice) -> Placement:
    """Return the chosen platform with its first device; a platform that fails here raises."""
    chosen = choice.chosen
    assert isinstance(chosen.record, PlatformEntry)
    try:
        platform: Platform = registry.load(chosen, chosen.record.target)()
        device = platform.devices()[0]
    except FOREIGN_ERRORS as error:
        failure = f"accepted this machine, but lists no device: {described(error)}"
        raise PlatformUnavailableError(
            f"device on platform {chosen.name!r}",
            [Refusal(chosen.name, chosen.origin, failure, traceback.format_exc())],
            f"mend or reinstall {chosen.provider}, or ask for another with INTERPOSER_PLATFORM",
        ) from error
    return Placement(platform, device, choice)


def _refuse_silent_fallback(
    registry: Registry, placement: Placement, plugin_failures: list[Refusal]
) -> None:
    """Raise if the choice is only second best because something broke."""
    chosen = placement.choice.chosen
    candidates = registry.candidates("platform")
    better = {(c.name, c.origin) for c in candidates if c.score >= chosen.score}
    failures = [
        refusal
        for refusal in placement.choice.refusals
        if refusal.traceback and (refusal.candidate, refusal.provider) in better
    ]
    failed = [
        f"{f.distribution} {f.version}"
        for f in registry.plugins.failed
        if any(score >= chosen.score for _, score in f.platforms)
    ]
    failures += [refusal for refusal in plugin_failures if refusal.provider in failed]
    if plugin_failures:  # asked only then, as torch may initialise the driver to answer
        visible = torch.accelerator.current_accelerator(check_available=True)
        if visible is not None and visible.type != placement.platform.device_type:
            failures += [refusal for refusal in plugin_failures if refusal not in failures]
    if failures:
        raise PlatformUnavailableError(
            f"automatic platform: {chosen.name!r} would be a silent fallback, for others failed",
            failures,
            f"mend what failed, or ask for it: INTERPOSER_PLATFORM={chosen.name}",
        )
