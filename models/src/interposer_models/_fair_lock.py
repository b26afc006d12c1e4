"""A lock under which threads take turns at one model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, get_ident


class FairLock:
    """A reentrant lock that a waiting thread gets before the last holder can take it again.

    A thread holds it for one step, not for one request. Without the order, a thread that steps in a
    loop would keep all others from queueing their requests until its own have ended.

    Attributes:
        owner: identifier of the thread that holds it; None while it is free.
        is_awaited: whether the next thread waits for it.
    """

    def __init__(self) -> None:
        self._turn = Lock()  # held by the next thread, while it waits for the lock
        self._lock = Lock()
        self.owner: int | None = None
        self.is_awaited = False
        self._depth = 0
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock."""
        thread = get_ident()
        if self.owner != thread:
            with self._turn:
                self.is_awaited = True
                self._lock.acquire()
                self.is_awaited = False
            self.owner = thread
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self.owner = None
            self._lock.release()
            self._call_deferred()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function with the lock: now if the lock is free, else once its holder releases it.

        It never waits, so that a generator may call it from its end, which the garbage collector
        can bring about in the middle of a step of the same thread.
        """
        self._deferred.append(function)
        self._call_deferred()

    def _call_deferred(self) -> None:
        # Whoever holds the lock comes here after the release.
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                if self._deferred:
                    self._deferred.popleft()()
            finally:
                self._lock.release()
