"""Where to run: the platform in force and its device, chosen like everything else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from interposer.capability import Device
from interposer.choice import Choice
from interposer.config import Config, effective_config
from interposer.errors import NoCandidateError, PlatformUnavailableError
from interposer.platform import Platform
from interposer.records import PlatformEntry, load_target
from interposer.registry import Registry, current_registry
from interposer.request import Request
from interposer.selection import select
from interposer.verdict import Refusal

__all__ = ["Placement", "current_platform", "place"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A platform with the device that a model goes to, and the choice behind it."""

    platform: Platform
    device: Device
    choice: Choice


def current_platform(config: Config | None = None) -> Platform:
    """Return the platform in force; asking again for the same configuration is cheap.

    Raises: PlatformUnavailableError: none accepts, the pinned one refuses, or a platform failed
        that might have been the better one.
    """
    return place(config).platform


def place(config: Config | None = None) -> Placement:
    """Return the platform in force with its first device, see ``current_platform``."""
    config = effective_config(config)
    return _place(current_registry(config), config.platform)


@lru_cache(maxsize=8)
def _place(registry: Registry, pinned: str | None) -> Placement:
    candidates = registry.candidates("platform")
    if not candidates:
        raise PlatformUnavailableError("platform", _plugin_failures(registry), "pip install interposer-cpu")
    try:
        choice = select(Request("platform", "platform"), candidates, pinned)
    except NoCandidateError as error:
        raise PlatformUnavailableError(
            "usable platform",
            (*error.refusals, *_plugin_failures(registry)),
            error.action or "install a plugin for this machine; `interposer plugins` lists what is there",
        ) from error
    record = choice.chosen.record
    assert isinstance(record, PlatformEntry)
    platform: Platform = load_target(record.target)()
    if pinned is None:
        _refuse_silent_fallback(registry, choice, platform)
    return Placement(platform, platform.devices()[0], choice)


def _refuse_silent_fallback(registry: Registry, choice: Choice, platform: Platform) -> None:
    """Raise if the choice is only second best because something broke."""
    failures = [refusal for refusal in choice.refusals if refusal.traceback]
    visible = torch.accelerator.current_accelerator(check_available=True)
    if visible is not None and visible.type != platform.device_type:
        failures += _plugin_failures(registry)
    if failures:
        name = choice.chosen.name
        raise PlatformUnavailableError(
            f"automatic platform: {name!r} would be a silent fallback, because others failed",
            failures,
            f"mend what failed, or ask for it: INTERPOSER_PLATFORM={name}",
        )


def _plugin_failures(registry: Registry) -> list[Refusal]:
    return [
        Refusal(f.name, f"{f.distribution} {f.version}", f.error.reason, f.traceback)
        for f in registry.plugins.failed
    ]
