"""Results that are computed once per argument, for all threads of a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, update_wrapper
from threading import RLock
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ForkSafeLock:
    """A reentrant lock, ``held``, that is free in a forked process.

    Such a process lacks the thread that may hold it, so nobody would ever release it.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.held = RLock()


class cached(Generic[P, R]):
    """A function whose last eight results are kept; its arguments are hashable.

    Threads that ask at once wait for one call, where ``lru_cache`` alone makes one in each. What
    raises is not kept.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self._kept = lru_cache(maxsize=8)(function)
        self._lock = ForkSafeLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the kept result, or that of calling the function now."""
        with self._lock.held:
            return self._kept(*args, **kwargs)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drop every result."""
        with self._lock.held:
            self._kept.cache_clear()
