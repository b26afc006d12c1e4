"""The lock of an engine, for ranks that all run the same program."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from interposer.errors import RequestError
from interposer_models._fair_lock import FairLock


class OneThreadLock(FairLock):
    """A lock that refuses a second thread while the first thread has unfinished requests.

    If every rank runs the same program, all ranks must make the same calls in the same order. The
    order of calls from two threads would depend on timing.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        super().__init__()
        self._is_busy = is_busy
        self._user: int | None = None

    def __enter__(self) -> None:
        """Take the lock.

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
        "the others: with interposer_models.launched(N) as load"
    )
