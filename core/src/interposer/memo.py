"""Results that are computed once per argument and shared by all threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from threading import RLock
from typing import ParamSpec, TypeVar

__all__ = ["memoized"]

P = ParamSpec("P")
R = TypeVar("R")


def memoized(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with its last eight results remembered; its arguments are hashable.

    Threads that ask at once wait for one call, where ``lru_cache`` alone makes one in each. What
    raises is not remembered.
    """
    cached = lru_cache(maxsize=8)(function)
    lock = RLock()

    def renew() -> None:
        # A forked process lacks the thread that may hold it, so nobody would ever release it.
        nonlocal lock
        lock = RLock()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with lock:
            return cached(*args, **kwargs)  # type: ignore[arg-type]

    return locked
