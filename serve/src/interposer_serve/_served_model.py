"""State of one model of a server: the requests that use or await the model, and changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from interposer_engine import MemoryNeed
from interposer_serve._endpoints import Endpoints
from interposer_serve._errors import ApiError
from interposer_serve._model_source import Model, ModelSource


@dataclass(frozen=True, slots=True)
class Use:
    """A request's use of a model, which stays loaded until ``end`` is called."""

    endpoints: Endpoints
    end: Callable[[], None]


class GiveUp(Exception):
    """A change of a model is no longer wanted, or another model can be changed sooner."""


class ServedModel:
    """A model of a server and its state.

    Attributes:
        source: The settings of the model.
        endpoints: The endpoints of the loaded model; None if no request can use the model.
        model: The model, as long as it takes memory.
        is_frozen: Whether the garbage collector ignores the model.
        num_users: Number of requests that use the model now.
        last_used: Time at which the last request ended, in seconds of the server's clock.
        loading: Task that loads the model; None if there is none.
        need: Memory of the loaded model; None if unknown.
        adapters: Folders of adapters that clients loaded, by name; None for one that they removed.
        is_asleep: Whether the model stays unloaded until a client wakes it.
        is_updated: Whether the weights differ from those of the checkpoint.
        failure: Error of the last load, if it failed.
        failed_at: Time of that failure, in seconds of the server's clock.
        refusal: Error for all requests and changes, once the server stops.
    """

    def __init__(self, source: ModelSource, changed: asyncio.Event, clock: Callable[[], float]):
        """Describe a model that is not loaded.

        Args:
            changed: Set and cleared after each change of a model of the server.
            clock: Returns the time in seconds, from any start.
        """
        self.source = source
        self.endpoints: Endpoints | None = None
        self.model: Model | None = None
        self.is_frozen = False
        self.num_users = 0
        self.last_used = clock()
        self.loading: asyncio.Task[None] | None = None
        self.need: MemoryNeed | None = None
        self.adapters: dict[str, str | None] = {}
        self.is_asleep = False
        self.is_updated = False
        self.failure: ApiError | None = None
        self.failed_at = 0.0
        self.refusal: ApiError | None = None
        self._changed = changed
        self._clock = clock
        self._waiters: list[asyncio.Future[Use]] = []
        self._num_changes = 0  # those that run or wait
        self._change_runs = False

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.source.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model and its adapters, also while the model is not loaded."""
        if self.endpoints is not None:
            return tuple(self.endpoints.names)
        names = [self.name, *self.source.adapters, *self.adapters]
        removed = {name for name, path in self.adapters.items() if path is None}
        return tuple(name for name in dict.fromkeys(names) if name not in removed)

    @property
    def status(self) -> str:
        """State of the model for clients."""
        if self.endpoints is not None:
            return "loaded"
        if self.is_asleep:
            return "sleeping"
        return "unloaded" if self.loading is None else "loading"

    @property
    def is_changing(self) -> bool:
        """Whether a change runs or waits, for which new requests wait."""
        return self._num_changes > 0

    @property
    def is_evictable(self) -> bool:
        """Whether the server may unload the model now, once its requests have ended."""
        return (
            self.endpoints is not None
            and self.source.load is not None
            and not (self.source.keep_loaded or self.is_updated or self.is_changing)
        )

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait until they can use the model."""
        return len(self._waiters)

    def use(self) -> Use | None:
        """Start a use of the model; return None if a request must wait for the model."""
        return None if self.endpoints is None or self.is_changing else self._new_use()

    def _new_use(self) -> Use:
        assert self.endpoints is not None
        self.num_users += 1

        def end() -> None:
            self.num_users -= 1
            self.last_used = self._clock()
            if not self.num_users:
                self.notify()

        return Use(self.endpoints, end)

    async def wait(self, start: Callable[[], None]) -> Use:
        """Wait until the model can be used, and start a use.

        Args:
            start: Called once the request is one of those that wait.
        Raises: Exception: the argument of ``fail``.
        """
        waiter: asyncio.Future[Use] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            start()
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().end()  # the use started when the request was cancelled
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.notify()  # a load for this request alone can be given up

    def serve_waiters(self) -> None:
        """Start a use of the model for all requests that wait.

        All start now: if each asked again, another model could be loaded in place of this one
        before.
        """
        for waiter in self._take_waiters():
            waiter.set_result(self._new_use())

    def fail(self, error: Exception) -> None:
        """Raise an error in all requests that wait for the model."""
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def refuse(self, error: ApiError) -> None:
        """Raise an error in all requests and changes that wait, as the server stops."""
        self.refusal = error
        self.fail(error)
        self.notify()

    def _take_waiters(self) -> list[asyncio.Future[Use]]:
        waiters = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.clear()
        return waiters

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Let new requests wait, and run no other change, in a ``with`` block.

        Raises: ApiError: the server stops.
        """
        self._num_changes += 1
        try:
            await self._wait_while(lambda: self._change_runs)
            self._change_runs = True
            try:
                yield
            finally:
                self._change_runs = False
        finally:
            self._num_changes -= 1
            self.notify()

    async def requests_end(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until no request uses the model; call this in a block of ``change``.

        Raises:
            GiveUp: ``gives_up`` has become true.
            ApiError: the server stops.
        """
        await self._wait_while(lambda: self.num_users > 0, gives_up)

    async def load_ends(self) -> None:
        """Wait until no task loads the model.

        Raises: ApiError: the server stops.
        """
        await self._wait_while(lambda: self.loading is not None)

    async def _wait_while(
        self, condition: Callable[[], bool], gives_up: Callable[[], bool] = lambda: False
    ) -> None:
        while condition():
            if self.refusal is not None:
                raise self.refusal
            if gives_up():
                raise GiveUp
            await self._changed.wait()

    def notify(self) -> None:
        """Wake all tasks that wait for a change of a model of the server."""
        self._changed.set()
        self._changed.clear()
