"""Run Python functions in threads, with a time limit that interrupts the function."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Expired(BaseException):
    """Raised inside a function after the time limit or the cancellation of the caller."""


class TimedCalls:
    """Runs functions one after the other, each in a new thread and with a time limit.

    A function that exceeds the limit is interrupted by an exception, which Python raises between
    two bytecode instructions. A function inside a C call is interrupted after that call.
    """

    def __init__(self, name: str, seconds: float | None) -> None:
        """Set the time limit.

        Args:
            name: Name of the threads.
            seconds: Wall time of one call, from the start of its function; None for no limit.
        """
        self._name = name
        self._seconds = seconds
        self._turn = threading.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function after all earlier calls, and return its result.

        If the awaiting task is cancelled, the function is interrupted or does not start.

        Raises:
            TimeoutError: The function exceeded the time limit.
            Exception: An error of the function.
        """
        call = _Call(function, self._turn, asyncio.get_running_loop())
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        try:
            await asyncio.shield(call.started)
            # Shield the futures: cancelling the task must not cancel the future that the thread
            # sets.
            return await asyncio.wait_for(asyncio.shield(call.result), self._seconds)
        finally:
            call.end()


class _Call(Generic[T]):
    """One function that a thread runs for an event loop.

    Attributes:
        started: Done when the function starts.
        result: Result or error of the function.
    """

    def __init__(
        self, function: Callable[[], T], turn: threading.Lock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.started: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[T] = loop.create_future()
        self._function = function
        self._turn = turn
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: int | None = None  # identifier of the thread while the function runs
        self._ended = False

    def run(self) -> None:
        """Run the function, and send its result to the event loop."""
        try:
            with self._turn:
                self._call_in_loop(self.started.set_result, None)
                result = self._run_function()
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            self._call_in_loop(self.started.cancel)
            if not isinstance(error, Expired):
                self._call_in_loop(self._set_error, error)
        else:
            self._call_in_loop(self._set_result, result)

    def _run_function(self) -> T:
        with self._lock:
            if self._ended:
                raise Expired
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            with self._lock:
                self._thread = None

    def end(self) -> None:
        """Interrupt a running function, or keep a waiting one from starting."""
        with self._lock:
            self._ended = True
            if self._thread is not None:
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Expired))

    def _call_in_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_result(self, result: T) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def _set_error(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
