"""Results that are computed once per argument and shared by all threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, update_wrapper
from threading import RLock
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Memoized(Generic[P, R]):
    """A function whose last eight results are remembered; its arguments are hashable.

    Threads that ask at once wait for one call, where ``lru_cache`` alone makes one in each. What
    raises is not remembered.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self._cached = lru_cache(maxsize=8)(function)
        self._lock = RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the remembered result, or that of calling the function now."""
        with self._lock:
            return self._cached(*args, **kwargs)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drop every remembered result."""
        with self._lock:
            self._cached.cache_clear()

    def _renew(self) -> None:
        # A forked process lacks the thread that may hold it, so nobody would ever release it.
        self._lock = RLock()


def memoized(function: Callable[P, R]) -> Memoized[P, R]:
    """Return ``function`` with its results remembered."""
    return Memoized(function)
