"""A cache of function results, computed once per argument for all threads of a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import Generic, ParamSpec, TypeVar

from interposer_sandbox._lock import ForkSafeLock

P = ParamSpec("P")
R = TypeVar("R")


class cached(Generic[P, R]):
    """A wrapper that caches a function's last eight results; arguments must be hashable.

    Concurrent threads share one call, while ``lru_cache`` alone would make one call per thread.
    Exceptions are not cached.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self._cache = lru_cache(maxsize=8)(function)
        self._lock = ForkSafeLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the cached result, or call the function."""
        with self._lock.held:
            return self._cache(*args, **kwargs)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drop every result."""
        with self._lock.held:
            self._cache.cache_clear()
