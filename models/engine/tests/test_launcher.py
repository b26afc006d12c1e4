"""The followers of a command when it ends: they get time to end by themselves, then are killed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from interposer.errors import RankError
from interposer_engine._distributed.launcher import Launched


class Clock:
    """A clock that only ``sleep`` advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Follower:
    """A process that ends by itself at a time, if it is not killed before."""

    def __init__(self, clock: Clock, ends_at: float) -> None:
        self._clock, self._ends_at = clock, ends_at
        self.was_killed = False

    def poll(self) -> int | None:
        return 0 if self._clock.now >= self._ends_at else None

    def kill(self) -> None:
        self.was_killed |= self.poll() is None

    def wait(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("seconds", "is_lost", "closed_after"),
    [
        ((0.0, 0.0), False, 0.0),
        ((2.0, 3.0), False, 3.0),
        ((2.0, float("inf")), False, 5.0),
        ((float("inf"), float("inf")), False, 5.0),
        ((2.0, 3.0), True, 0.0),
    ],
)
def test_followers_end_by_themselves_or_are_killed(
    seconds: tuple[float, ...], is_lost: bool, closed_after: float
) -> None:
    clock = Clock()
    launched = Launched(1 + len(seconds), clock=clock, sleep=clock.sleep)
    followers = [Follower(clock, clock.now + end_seconds) for end_seconds in seconds]
    launched._followers = cast(Any, followers)
    if is_lost:
        launched._losses.first = RankError(0, "rank 1 was ended by SIGKILL", [1])
    launched._close()
    assert clock.now - 100.0 == pytest.approx(closed_after, abs=0.02)
    assert [follower.was_killed for follower in followers] == [
        end_seconds > closed_after for end_seconds in seconds
    ]
