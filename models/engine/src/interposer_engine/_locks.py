"""Locks that let threads share one model: by turns, or one thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, get_ident

from interposer.errors import RequestError


class FairLock:
    """A reentrant lock that serves waiting threads before the last holder can take it again.

    A thread holds the lock for one step, not for a whole request. Without this order, a thread that
    steps in a loop could keep other threads from queueing requests.

    Attributes:
        owner: Identifier of the holding thread; None while the lock is free.
        is_awaited: Whether the next thread waits for the lock.
    """

    def __init__(self) -> None:
        self._turn = Lock()  # held by the next thread, while it waits for the lock
        self._lock = Lock()
        self.owner: int | None = None
        self.is_awaited = False
        self._depth = 0
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Acquire the lock."""
        thread = get_ident()
        if self.owner != thread:
            with self._turn:
                self.is_awaited = True
                self._lock.acquire()
                self.is_awaited = False
            self.owner = thread
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Release the lock, and run the functions of ``call_soon``."""
        self._depth -= 1
        if not self._depth:
            self.owner = None
            self._lock.release()
            self._call_deferred()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function under the lock: now if the lock is free, or else when it is released.

        This never waits. So the garbage collector may close a generator, which calls this method,
        in the middle of a step of the same thread.
        """
        self._deferred.append(function)
        self._call_deferred()

    def _call_deferred(self) -> None:
        # If the lock is held, its holder calls this method after the release.
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                if self._deferred:
                    self._deferred.popleft()()
            finally:
                self._lock.release()


class OneThreadLock(FairLock):
    """A lock that refuses other threads while the first thread has unfinished requests.

    If every rank runs the same program, all ranks must make the same calls in the same order. The
    order of calls from two threads would depend on timing.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        super().__init__()
        self._is_busy = is_busy
        self._user: int | None = None

    def __enter__(self) -> None:
        """Acquire the lock, or raise RequestError if another thread uses the model.

        Raises: RequestError: another thread holds the lock, or has unfinished requests.
        """
        thread = get_ident()
        if self.owner not in (None, thread):
            raise _second_thread()
        super().__enter__()
        # The last thread may have returned between two steps of its requests.
        if self._user not in (None, thread) and self._is_busy():
            super().__exit__()
            raise _second_thread()
        self._user = thread


def _second_thread() -> RequestError:
    return RequestError(
        "Another thread uses this model, and all ranks must make the same calls in the same order, "
        "which two threads cannot promise. Try: make all calls in one thread, or let rank 0 lead "
        "the others: with interposer_engine.launched(N) as load"
    )
