"""The clock of an accelerator, and what the accelerator was measured to reach."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import median

import torch

from interposer import Config, Placement, place
from interposer_engine.roofline import Roofs, measured_roofs

__all__ = [
    "Call",
    "Clock",
    "EventClock",
    "HostClock",
    "accelerator_placement",
    "clock_of",
    "placement_of",
    "roofs_by",
]

Call = Callable[[], object]

# More than the largest last-level cache that is described, of 256 MiB, holds.
_FLUSH_NUMBERS = 128 << 20


def accelerator_placement(platform: str = "") -> Placement:
    """Return the device to measure on; without an accelerator, end with a sentence."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise SystemExit(
            f"Nothing is measured: torch {torch.__version__} sees no accelerator on this machine."
        )
    placement = place(Config(platform=platform) if platform else None)
    if placement.platform.device_type != found.type:
        raise SystemExit(
            f"Nothing is measured: the platform in force is {placement.platform.name!r}, though "
            f"torch sees an accelerator of the type {found.type!r}. Install a plugin for it."
        )
    return placement


def placement_of(platform: str, tiny: bool) -> Placement:
    """Return the device to measure on; a rehearsal takes whatever platform is named or in force."""
    if tiny:
        return place(Config(platform=platform) if platform else None)
    return accelerator_placement(platform)


class Clock(ABC):
    """Times calls; before each, the caches are filled with other numbers."""

    def __init__(self, device: str, rounds: int = 30, flush_numbers: int = _FLUSH_NUMBERS) -> None:
        self.device = torch.device(device)
        self.rounds = rounds
        self._flush = torch.zeros(flush_numbers, dtype=torch.int32, device=device)

    def time(self, calls: list[Call]) -> list[float]:
        """Return the median seconds of each call; they take turns."""
        for call in calls:
            for _ in range(min(3, self.rounds)):
                call()
        taken: list[list[float]] = [[] for _ in calls]
        for turn in range(self.rounds):
            for turned in range(len(calls)):
                number = (turn + turned) % len(calls)
                self._flush.add_(1)
                taken[number].append(self._once(calls[number]))
        return [median(seconds) for seconds in taken]

    @abstractmethod
    def _once(self, call: Call) -> float:
        """Return the seconds that the device takes for a call."""


class EventClock(Clock):
    """Times by the device's own events."""

    def _once(self, call: Call) -> float:
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class HostClock(Clock):
    """Times by the host's clock what is done when the call returns."""

    def _once(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def clock_of(device: str, tiny: bool) -> Clock:
    """Return the clock of a device; that of a rehearsal looks twice."""
    if torch.device(device).type == "cpu":
        return HostClock(device, 2 if tiny else 30, 1024 if tiny else _FLUSH_NUMBERS)
    return EventClock(device, 2 if tiny else 30)


def roofs_by(clock: Clock, placement: Placement, tiny: bool = False) -> Roofs:
    """Return the roofs of the device by its own clock; those of a rehearsal are small."""
    side = 64 if tiny else None
    return measured_roofs(
        placement,
        seconds=lambda calls: clock.time([*calls]),
        read_bytes=side and side**2,
        side=side,
    )
