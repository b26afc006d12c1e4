"""Calls in threads of their own that end after their time."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Expired(BaseException):
    """The time of a call is over; raised in the midst of it."""


class TimedCalls:
    """One call after the other, each of which ends after its time, whatever it does in Python."""

    def __init__(self, name: str, seconds: float | None) -> None:
        """Start nothing yet.

        Args:
            name: of the threads.
            seconds: from when a call begins; None bounds it not.
        """
        self._name = name
        self._seconds = seconds
        self._turn = threading.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Return what a function returns, after the calls that were there first.

        Raises: TimeoutError: its time is over. And what the function raises.
        """
        call = _Call(function, self._turn, asyncio.get_running_loop())
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        try:
            await asyncio.shield(call.begun)
            return await asyncio.wait_for(asyncio.shield(call.result), self._seconds)
        finally:
            call.end()


class _Call(Generic[T]):
    """A function that a thread calls for an event loop."""

    def __init__(
        self, function: Callable[[], T], turn: threading.Lock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.begun: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[T] = loop.create_future()
        self._function = function
        self._turn = turn
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: int | None = None  # while the function runs
        self._ended = False

    def run(self) -> None:
        """Call the function, and tell the event loop."""
        try:
            with self._turn:
                self._tell(self.begun.set_result, None)
                result = self._called()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self._tell(self.begun.cancel)
            if not isinstance(error, Expired):
                self._tell(self._set_error, error)
        else:
            self._tell(self._set_result, result)

    def _called(self) -> T:
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
        """Raise in the midst of the function, or before it begins; nothing where it has ended."""
        with self._lock:
            self._ended = True
            if self._thread is not None:
                number = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(Expired))

    def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_result(self, result: T) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def _set_error(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
