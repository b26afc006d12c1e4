"""Time since the epoch from a clock that is never adjusted while the process runs."""

from __future__ import annotations

import time

_OFFSET = time.time_ns() - time.monotonic_ns()


def steady_time_ns() -> int:
    """Return nanoseconds since the epoch; differences stay correct if the system clock is set."""
    return _OFFSET + time.monotonic_ns()
