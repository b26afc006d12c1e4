"""Timing of calls on a device, with cold caches."""

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
    """Median and quartiles of the times of one call, in seconds."""

    median: float
    low: float
    high: float


class Clock:
    """Times calls on one device, from the call to the end of the submitted work.

    Args:
        timer: a clock that returns seconds.
    """

    def __init__(
        self, platform: Platform, device: Device, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self._timer = timer
        self._platform = platform
        self._device = device.torch_device
        largest = max(device.capability.caches_bytes.values(), default=0) or _UNKNOWN_CACHE_BYTES
        # Twice the largest cache, so that writing the buffer evicts all operands.
        size = min(2 * largest, _LARGEST_BUFFER_BYTES)
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=self._device)

    def time(
        self,
        calls: Sequence[Callable[[], object]],
        repeats: int,
        refresh: Callable[[int], None] | None = None,
    ) -> list[Spread]:
        """Time each of ``calls`` ``repeats`` times; return one ``Spread`` per call, in order.

        The calls alternate, and each round starts with another call. So other load on the machine
        affects all calls alike. An exception from a call is passed on.

        Args:
            refresh: called before each round with its number, to change the arguments: a kernel
                that remembers results would look fast.
        """
        for call in calls:
            for _ in range(_WARM_UP_CALLS):  # compile, pack weights, allocate
                call()
        self._platform.synchronize(self._device)
        seconds_by_call: list[list[float]] = [[] for _ in calls]
        with _without_garbage_collection():
            for repeat in range(repeats):
                if refresh is not None:
                    refresh(repeat)
                for offset in range(len(calls)):
                    index = (repeat + offset) % len(calls)
                    seconds_by_call[index].append(self._once(calls[index]))
        return [_spread(seconds) for seconds in seconds_by_call]

    def _once(self, call: Callable[[], object]) -> float:
        self._buffer.add_(1)  # larger than the caches, so it evicts the operands
        self._platform.synchronize(self._device)
        start = self._timer()
        call()
        self._platform.synchronize(self._device)
        return self._timer() - start


def _spread(seconds: Sequence[float]) -> Spread:
    low, median, high = quantiles(seconds, n=4, method="inclusive")
    return Spread(median, low, high)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    # A collection that starts in a call would count as time of this call.
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
