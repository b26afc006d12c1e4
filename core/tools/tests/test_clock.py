"""The clock: fair turns, cold caches, quartiles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch

from interposer import Capability, Device, Platform
from interposer_testing.workload import typical_sequences, typical_step
from interposer_tools._tuner.clock import Clock, Spread


class Recording:
    """A platform as far as the clock needs one; its device finishes its work in ``synchronize``.

    Attributes:
        seconds: the time now, as ``timer`` returns it.
        pending_seconds: length of the work that the device has not finished.
        synchronized: number of calls of ``synchronize``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pending_seconds = 0.0
        self.synchronized = 0

    def synchronize(self, device: str) -> None:
        self.synchronized += 1
        self.seconds += self.pending_seconds
        self.pending_seconds = 0.0

    def timer(self) -> float:
        return self.seconds


def clock(platform: Recording, cache_bytes: int = 1024) -> Clock:
    capability = Capability("any", caches_bytes={"l1": 64, "l2": cache_bytes})
    device = Device("bench", "cpu", "bench", capability)
    return Clock(cast("Platform", platform), device, platform.timer)


def test_calls_alternate_and_each_one_starts_a_round() -> None:
    order: list[str] = []
    calls: list[Callable[[], object]] = [lambda n=name: order.append(n) for name in "abc"]  # type: ignore[misc]
    spreads = clock(Recording()).time(calls, repeats=3)
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab"
    assert len(spreads) == 3


def test_a_spread_has_median_and_quartiles_of_the_calls() -> None:
    durations = iter([50.0, 50.0, 2.0, 20.0, 6.0, 4.0, 8.0])  # two to warm up
    platform = Recording()

    def call() -> None:
        platform.seconds += next(durations)

    (spread,) = clock(platform).time([call], repeats=5)
    assert spread == Spread(median=6.0, low=4.0, high=8.0)


def test_the_device_is_synchronized_before_and_after_each_call() -> None:
    """A call's time includes the work that it left to the device, and no work of another call."""
    platform = Recording()

    def leave_work(seconds: float) -> None:
        platform.pending_seconds += seconds

    calls = [partial(leave_work, 1.0), partial(leave_work, 3.0)]
    spreads = clock(platform).time(calls, repeats=4)
    assert platform.synchronized == 1 + 2 * 2 * 4
    assert [spread.median for spread in spreads] == [1.0, 3.0]
    assert all(spread.low == spread.median == spread.high for spread in spreads)


def test_caches_are_cold() -> None:
    """The buffer written between two calls is larger than the cache that the device states."""
    small_cache_clock = clock(Recording(), cache_bytes=1 << 20)
    small_cache_clock.time([lambda: None], repeats=3)
    assert small_cache_clock._buffer.nbytes >= 2 << 20
    assert torch.equal(small_cache_clock._buffer, torch.full_like(small_cache_clock._buffer, 3))


def test_garbage_is_not_collected_in_between() -> None:
    enabled_in_call: list[bool] = []
    clock(Recording()).time([lambda: enabled_in_call.append(gc.isenabled())], repeats=3)
    assert enabled_in_call[-3:] == [False] * 3
    assert gc.isenabled()

    def fail() -> None:
        if not gc.isenabled():
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        clock(Recording()).time([fail], repeats=3)
    assert gc.isenabled()


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 33, 256])
def test_a_typical_step_has_the_requested_tokens(num_tokens: int) -> None:
    sequences = typical_sequences(num_tokens)
    assert sum(new for _, new in sequences) == num_tokens
    batch, num_pages = typical_step(num_tokens, 16)
    assert int(batch.query_starts[-1]) == num_tokens == len(batch.slots.unique())
    assert batch.seq_lens.tolist() == [cached for cached, _ in sequences]
    assert int(batch.page_table.max()) + 1 == num_pages
    last = batch.query_starts[1:] - 1
    ends = (batch.seq_lens - 1) // 16
    pages = batch.page_table.gather(1, ends[:, None]).squeeze(1)
    assert torch.equal(batch.slots[last], pages * 16 + (batch.seq_lens - 1) % 16)
