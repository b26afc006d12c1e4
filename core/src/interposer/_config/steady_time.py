"""The time since the epoch, by a clock that nobody sets while the process runs."""

from __future__ import annotations

import time

_OFFSET = time.time_ns() - time.monotonic_ns()


def steady_time_ns() -> int:
    """Return nanoseconds since the epoch; differences are right even where the clock is set."""
    return _OFFSET + time.monotonic_ns()
