"""Blocking calls in threads that do not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(
    function: Callable[[], T], discard: Callable[[T], None] = lambda _: None
) -> T:
    """Call a function in a thread, and return its result.

    Unlike ``asyncio.to_thread``, neither the event loop nor the interpreter waits for the thread at
    the end of the process.

    Args:
        discard: Called in the thread with a result that the cancelled caller cannot take.
    Raises:
        RuntimeError: The function raised an exception that a coroutine cannot raise, such as
            SystemExit.
        Exception: Any other error of the function.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    # The result is moved from here, so that the thread does not refer to it afterwards.
    results: list[T] = []

    def settle(error: Exception | None) -> None:
        if not future.cancelled():
            if error is None:
                future.set_result(results.pop())
            else:
                future.set_exception(error)
        elif error is None:
            threading.Thread(target=discard, args=(results.pop(),), daemon=True).start()

    def call() -> None:
        error: Exception | None = None
        try:
            results.append(function())
        except BaseException as raised:  # noqa: BLE001 - raised in the caller
            error = raised if isinstance(raised, Exception) else None
            if error is None or isinstance(raised, StopIteration):
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
                error.__cause__ = raised
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:  # the event loop is closed
            if error is None:
                discard(results.pop())

    threading.Thread(target=call, name="interposer-load", daemon=True).start()
    return await future
