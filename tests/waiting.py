"""Wait for a condition that another process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["WAIT_SECONDS", "wait_until"]

# The one time limit of the tests. It ends a test that would wait forever; no machine that is merely
# busy comes near it.
WAIT_SECONDS = 300.0


def wait_until(condition: Callable[[], object], description: object = "the condition") -> None:
    """Poll ``condition`` until it is true.

    Raises: AssertionError: ``WAIT_SECONDS`` passed; the message holds ``description``, which is
        called first if it is a function.
    """
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        text = description() if callable(description) else description
        assert time.monotonic() < give_up, f"waited {WAIT_SECONDS:.0f} s for: {text}"
        time.sleep(0.01)
