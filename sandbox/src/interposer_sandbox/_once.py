"""Results that are computed once per argument, for all threads of a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import Generic, ParamSpec, TypeVar

from interposer_sandbox._lock import ForkSafeLock

P = ParamSpec("P")
R = TypeVar("R")


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
