"""The clock: how long calls take on a device whose caches hold nothing of theirs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles

import torch

from interposer import Device, Platform

_UNKNOWN_CACHE_BYTES = 64 << 20
_LARGEST_BUFFER_BYTES = 1 << 30
_WARM_UP_CALLS = 2


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of what a call took, in seconds."""

    median: float
    low: float
    high: float


class Clock:
    """Times calls on one device, from the call to the end of its work there.

    Args:
        timer: returns the seconds since any fixed moment.
    """

    def __init__(
        self, platform: Platform, device: Device, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self._timer = timer
        self._platform = platform
        self._device = device.torch_device
        largest = max(device.capability.caches_bytes.values(), default=0) or _UNKNOWN_CACHE_BYTES
        size = min(2 * largest, _LARGEST_BUFFER_BYTES)
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=self._device)

    def time(self, calls: Sequence[Callable[[], object]], repeats: int) -> list[Spread]:
        """Return the spread of ``repeats`` runs of each of ``calls``.

        The calls take turns and each round begins with another, so that whatever the machine does
        besides meets all of them alike. What a call raises is passed on.
        """
        for call in calls:
            for _ in range(_WARM_UP_CALLS):  # compiles, packs and allocates what is kept
                call()
        self._platform.synchronize(self._device)
        taken: list[list[float]] = [[] for _ in calls]
        with _without_collections():
            for turn in range(repeats):
                for place in range(len(calls)):
                    number = (turn + place) % len(calls)
                    taken[number].append(self._once(calls[number]))
        return [_spread(seconds) for seconds in taken]

    def _once(self, call: Callable[[], object]) -> float:
        self._buffer.add_(1)  # reads and writes more than the caches hold
        self._platform.synchronize(self._device)
        start = self._timer()
        call()
        self._platform.synchronize(self._device)
        return self._timer() - start


def _spread(seconds: Sequence[float]) -> Spread:
    low, median, high = quantiles(seconds, n=4, method="inclusive")
    return Spread(median, low, high)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from running inside a call."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
