"""A lock that a fork of the process does not inherit."""

from __future__ import annotations

import os
from threading import RLock


class ForkSafeLock:
    """A reentrant lock, used as ``with lock.held``, that is free in each forked process.

    A forked process lacks the thread that holds the lock, so the lock would never be released.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.held = RLock()
