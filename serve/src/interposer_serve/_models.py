"""The models of a server: loaded on demand, unloaded when they are idle or memory is short."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from interposer.errors import ConfigError, InterposerError, near_names
from interposer_adapt import Encoder
from interposer_engine import LanguageModel, MemoryNeed
from interposer_serve._endpoints import Answer, Endpoints
from interposer_serve._errors import ApiError
from interposer_serve._requests import Body
from interposer_serve._text import TextEndpoints
from interposer_serve._vectors import VectorEndpoints

# Beside weights, a model needs memory for its caches and steps.
_MAX_WEIGHTS_FRACTION = 0.8
_log = logging.getLogger("interposer")
Model = LanguageModel | Encoder


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model of a server, loaded already or to be loaded when a request names it.

    Attributes:
        name: Name of the model for clients.
        model: The model, if it is loaded already. The server never unloads it.
        load: Loads the model, in any thread; None if ``model`` is given.
        is_encoder: Whether ``load`` returns an ``Encoder``.
        path: Folder of the checkpoint, whose place ``name`` takes in errors for clients.
        adapters: Names of the adapters that ``load`` loads with the model.
        memory: Returns the memory that the model needs, in any thread. The server unloads others
            if it is not free. None loads the model in any case.
        idle_seconds: Time without requests after which the model is unloaded; None for never.
        keep_loaded: Whether the model is loaded at the start, and never unloaded for another one.
    Raises: ConfigError: there is no model and no function that loads it, or there are both.
    """

    name: str
    model: Model | None = None
    load: Callable[[], Model] | None = None
    is_encoder: bool = False
    path: str | Path | None = None
    adapters: Collection[str] = ()
    memory: Callable[[], MemoryNeed] | None = None
    idle_seconds: float | None = None
    keep_loaded: bool = False

    def __post_init__(self) -> None:
        if (self.load is None) == (self.model is None):
            number = "neither" if self.load is None else "both"
            raise ConfigError(
                f"The model {self.name!r} has {number} of model and load. Try: one of them"
            )

    @property
    def kind(self) -> type[Endpoints]:
        """Type of the model's endpoints."""
        is_encoder = self.is_encoder or isinstance(self.model, Encoder)
        return VectorEndpoints if is_encoder else TextEndpoints


class Use:
    """A request's use of a model, which cannot be unloaded before ``end``."""

    def __init__(self, endpoints: Endpoints, end: Callable[[], None]) -> None:
        self.endpoints = endpoints
        self.end = end


@dataclass(eq=False)
class _Entry:
    """A model of the server and its state.

    Attributes:
        endpoints: The endpoints of the loaded model; None if the model is not loaded.
        users: Number of requests that use the model now.
        waiters: Requests that wait until the model can be used.
        last_used: Time at which the last request ended, in seconds of the server's clock.
        num_holders: Number of changes, such as unloading, for which new requests wait.
        change: Held by the one change that may run.
        loading: Task that loads the model; None if none does.
        adapters: Adapters that clients loaded, by name; None for a name that they unloaded.
        is_asleep: Whether the model waits to be woken, instead of being loaded on demand.
        is_updated: Whether its weights are others than those of the checkpoint.
    """

    source: ModelSource
    endpoints: Endpoints | None = None
    model: Model | None = None
    users: int = 0
    waiters: list[asyncio.Future[Use]] = field(default_factory=list)
    last_used: float = 0.0
    num_holders: int = 0
    change: asyncio.Lock = field(default_factory=asyncio.Lock)
    loading: asyncio.Task[None] | None = None
    need: MemoryNeed | None = None
    adapters: dict[str, str | None] = field(default_factory=dict)
    is_asleep: bool = False
    is_updated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model and its adapters are served, also while it is not loaded."""
        if self.endpoints is not None:
            return tuple(self.endpoints.names)
        names = [self.source.name, *self.source.adapters, *self.adapters]
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

    def take_waiters(self) -> list[asyncio.Future[Use]]:
        """Return the requests that still wait, of which the list is cleared."""
        waiters = [waiter for waiter in self.waiters if not waiter.done()]
        self.waiters.clear()
        return waiters

    @property
    def is_evictable(self) -> bool:
        """Whether the server may unload the model on its own."""
        return (
            self.endpoints is not None
            and self.source.load is not None
            and not self.source.keep_loaded
            and not self.is_updated
        )


class Models:
    """The models of a server.

    All methods run in the event loop of the server.

    Attributes:
        default: Name of the model for requests that name none.
    """

    def __init__(
        self,
        sources: Iterable[ModelSource],
        new_endpoints: Callable[[Model, str], Endpoints],
        *,
        default: str | None = None,
        max_loaded: int | None = None,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the models, without loading one.

        Args:
            sources: The models; the first is the default if ``default`` is None.
            new_endpoints: Returns the endpoints of a loaded model with a name.
            max_loaded: Number of models that may be loaded at once; None for no limit.
            max_waiting: Number of requests that may wait for a model that is not loaded.
            clock: Returns the time in seconds, from any start.
        Raises: ConfigError: there is no model, two have the same name, ``default`` names none, or
            more models stay loaded than may be loaded at once.
        """
        all_sources = [*sources]
        if not all_sources:
            raise ConfigError("There is no model to serve. Try: at least one ModelSource")
        names = [source.name for source in all_sources]
        self.default = names[0] if default is None else default
        if self.default not in names:
            allowed = near_names(self.default, names)
            raise ConfigError(f"The default model is {self.default!r}; allowed is {allowed}")
        # The default model is listed first, where clients look for a model.
        all_sources.sort(key=lambda source: source.name != self.default)
        self._entries = {source.name: _Entry(source) for source in all_sources}
        if max_loaded is not None and max_loaded < 1:
            raise ConfigError(f"max_loaded is {max_loaded!r}, must be at least 1")
        self._max_loaded = len(all_sources) if max_loaded is None else max_loaded
        self._new_endpoints = new_endpoints
        self._max_waiting = max_waiting
        self._clock = clock
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Event()
        self._expiry: asyncio.Task[None] | None = None
        self._freezes = False
        for entry in self._entries.values():
            if (model := entry.source.model) is not None:
                entry.model = model
                entry.endpoints = new_endpoints(model, entry.source.name)
        self._check_names(all_sources)
        self._check_room()

    def _check_names(self, sources: Sequence[ModelSource]) -> None:
        counts = Counter(source.name for source in sources)
        for entry in self._entries.values():
            counts.update(name for name in entry.names if name != entry.source.name)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(
                f"Two models or adapters are called {repeated[0]!r}. "
                "Try: another name for one of them"
            )

    def _check_room(self) -> None:
        sources = [entry.source for entry in self._entries.values()]
        staying = [source for source in sources if source.keep_loaded or source.load is None]
        has_others = len(staying) < len(self._entries)
        if len(staying) + has_others > self._max_loaded:
            raise ConfigError(
                f"{len(staying)} models stay loaded, but max_loaded is {self._max_loaded}, which "
                "leaves no place for the others. Try: a larger max_loaded"
            )

    @property
    def paths(self) -> dict[str, tuple[Answer, type[Body]]]:
        """The endpoints of all models: method and type of the body, by path.

        The paths of a model that is not loaded yet are all of its kind.
        """
        paths: dict[str, tuple[Answer, type[Body]]] = {}
        for entry in self._entries.values():
            kind, endpoints = entry.source.kind, entry.endpoints
            available = kind.paths if endpoints is None else endpoints.available
            paths |= {path: kind.paths[path] for path in kind.paths if path in available}
        return paths

    @property
    def folders(self) -> dict[str, str]:
        """Folders of checkpoints, which clients must not see, with the model's name."""
        folders: dict[str, str] = {}
        for name, entry in self._entries.items():
            path = entry.source.path or getattr(entry.source.model, "path", None)
            for folder in () if path is None else (Path(path).resolve(), Path(path).absolute()):
                folders[str(folder)] = name
        return folders

    @property
    def names(self) -> list[str]:
        """Names under which models and adapters are served."""
        return [name for entry in self._entries.values() for name in entry.names]

    def owner(self, name: str) -> str:
        """Return the name of the model with a name, or with an adapter of that name.

        Raises: ApiError: no model and no adapter has the name.
        """
        return self._entry(name).source.name

    def status(self, name: str) -> str:
        """Return the state of a model: loaded, loading, unloaded or sleeping."""
        return self._entry(name).status

    def loaded(self, name: str) -> Endpoints | None:
        """Return the endpoints of a model; None if it is not loaded."""
        return self._entry(name).endpoints

    @property
    def _loaded(self) -> list[Endpoints]:
        entries = self._entries.values()
        return [entry.endpoints for entry in entries if entry.endpoints is not None]

    @property
    def num_unfinished(self) -> int:
        """Number of answers of all models that run or wait."""
        return sum(endpoints.num_unfinished for endpoints in self._loaded)

    @property
    def trouble(self) -> str:
        """Reason why requests to a loaded model would fail; "" if no reason is known."""
        return next((each.trouble for each in self._loaded if each.trouble), "")

    def end_answers(self) -> None:
        """End every unfinished answer with an error."""
        for endpoints in self._loaded:
            endpoints.end_answers()

    def freeze_objects(self) -> None:
        """Keep the garbage collector from scanning loaded models, which stops all threads.

        This is for servers that own their process: the collector then ignores all other objects
        that exist at that moment, too.
        """
        self._freezes = True
        self._collect()

    def _collect(self) -> None:
        if self._freezes:
            gc.unfreeze()
        gc.collect()
        if self._freezes:
            gc.freeze()

    async def start(self) -> None:
        """Load the default model and those that stay loaded, and watch for idle ones."""
        for entry in self._entries.values():
            is_default = entry.source.name == self.default
            if entry.endpoints is not None:
                await entry.endpoints.start()
            elif is_default or entry.source.keep_loaded:
                (await self.use(entry.source.name, None)).end()
        self._expiry = asyncio.create_task(self._watch_idle())

    async def stop(self) -> None:
        """End the threads of all models, and close the models that the server loaded."""
        tasks = [entry.loading for entry in self._entries.values()]
        for task in (self._expiry, *tasks):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
        for entry in self._entries.values():
            if entry.endpoints is not None:
                await entry.endpoints.stop()
                if entry.source.model is None:  # other models belong to the caller
                    await self._close(entry)

    async def use(self, name: str, seconds: float | None) -> Use:
        """Load a model unless it is loaded, and keep it loaded until the end of the use.

        Args:
            name: Name of the model, or of one of its adapters.
            seconds: Longest time to wait; None for no limit.
        Raises: ApiError: there is no such model, it sleeps or cannot be loaded, too many requests
            wait for it, or the time has passed.
        """
        entry = self._entry(name)
        if entry.endpoints is not None and not entry.num_holders:
            return self._used(entry)
        if len(entry.waiters) >= self._max_waiting:
            message = f"{len(entry.waiters)} requests wait for the model. Try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "5"})
        waiter = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._serve_waiters(entry)
        try:
            async with asyncio.timeout(seconds):
                used: Use = await waiter
                return used
        except BaseException as error:
            failure = waiter.exception() if waiter.done() and not waiter.cancelled() else None
            if waiter.done() and not waiter.cancelled() and failure is None:
                waiter.result().end()  # it came together with the end of the request
            if failure is error or not isinstance(error, TimeoutError):
                raise
            message = f"The model {entry.source.name!r} was not loaded within {seconds:g} s"
            raise ApiError(504, message, code="deadline_exceeded") from None
        finally:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            self._notify()  # a load for this request alone can end

    async def unload(self, name: str) -> None:
        """Unload a model once its requests have ended; the next request loads it again.

        Raises: ApiError: there is no such model, or it cannot be loaded again.
        """
        await self._remove(name, falls_asleep=False)

    async def sleep(self, name: str) -> None:
        """Unload a model once its requests have ended; later requests fail until ``wake``.

        Raises: ApiError: there is no such model, or it cannot be loaded again.
        """
        await self._remove(name, falls_asleep=True)

    async def _remove(self, name: str, *, falls_asleep: bool) -> None:
        entry = self._entry(name)
        if entry.source.load is None:
            message = f"The model {entry.source.name!r} stays loaded: the server cannot reload it"
            raise ApiError(400, message, param="model", code="not_honoured")
        async with self._alone(entry):
            while entry.loading is not None:
                await self._changed.wait()
            entry.is_asleep = entry.is_asleep or falls_asleep
            await self._unload(entry)
            entry.is_updated = False

    async def wake(self, name: str, seconds: float | None) -> None:
        """Load a model that sleeps.

        Raises: ApiError: as ``use``.
        """
        entry = self._entry(name)
        entry.is_asleep = False
        (await self.use(name, seconds)).end()

    @asynccontextmanager
    async def updating(self, name: str, seconds: float | None) -> AsyncIterator[Endpoints]:
        """Change the weights of a model in the ``with`` block, while no request uses the model.

        Afterwards the server does not unload the model on its own: the changed weights are nowhere
        else.

        Raises: ApiError: as ``use``.
        """
        entry = self._entry(name)
        while True:
            (await self.use(name, seconds)).end()
            async with self._alone(entry):
                if entry.endpoints is not None:
                    yield entry.endpoints
                    entry.is_updated = True
                    return

    def change_adapter(self, name: str, adapter: str, path: str | None) -> None:
        """Record that clients loaded an adapter from a path, or unloaded it, for later loads."""
        self._entry(name).adapters[adapter] = path

    def check_new(self, adapter: str, name: str) -> None:
        """Check that no other model has the name of a new adapter.

        Raises: ApiError: another model, or an adapter of another model, has that name.
        """
        entry = self._entry(name)
        others = {n for other in self._entries.values() if other is not entry for n in other.names}
        if adapter in others or adapter == entry.source.name:
            message = f"lora_name is {adapter!r:.100}, the name of a model or adapter. Try: another"
            raise ApiError(400, message, param="lora_name", code="invalid_value")

    async def unload_idle(self) -> None:
        """Unload the models that were idle for longer than their sources allow."""
        for entry in self._entries.values():
            if self._seconds_until_idle(entry) == 0:
                async with self._alone(entry):
                    # A request may have come while others ended.
                    if self._seconds_until_idle(entry) == 0:
                        await self._unload(entry)

    def _seconds_until_idle(self, entry: _Entry) -> float | None:
        """Return the time until a model may be unloaded for being idle; None for never."""
        allowed = entry.source.idle_seconds
        if allowed is None or not entry.is_evictable or entry.users or entry.waiters:
            return None
        return max(0.0, entry.last_used + allowed - self._clock())

    async def _watch_idle(self) -> None:
        while True:
            waits = [self._seconds_until_idle(entry) for entry in self._entries.values()]
            next_wait = min((wait for wait in waits if wait is not None), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(next_wait):
                    await self._changed.wait()
            await self.unload_idle()

    def _entry(self, name: str) -> _Entry:
        if (entry := self._entries.get(name)) is not None:
            return entry
        for entry in self._entries.values():
            if name in entry.names:
                return entry
        message = f"model is {name!r:.100}; allowed is {near_names(name, self.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _notify(self) -> None:
        """Wake all tasks that wait for a change of a model."""
        self._changed.set()
        self._changed.clear()

    @asynccontextmanager
    async def _alone(
        self, entry: _Entry, is_wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[None]:
        """Let the requests of a model end, and new ones wait, while a ``with`` block changes it.

        Raises: _UnwantedError: ``is_wanted`` has become false.
        """
        entry.num_holders += 1
        try:
            async with entry.change:
                while entry.users:
                    if not is_wanted():
                        raise _UnwantedError
                    await self._changed.wait()
                yield
        finally:
            entry.num_holders -= 1
            self._serve_waiters(entry)
            self._notify()

    def _used(self, entry: _Entry) -> Use:
        """Count one more request that uses a loaded model."""
        assert entry.endpoints is not None
        entry.users += 1

        def end() -> None:
            entry.users -= 1
            entry.last_used = self._clock()
            if not entry.users:
                self._notify()

        return Use(entry.endpoints, end)

    def _serve_waiters(self, entry: _Entry) -> None:
        """Pass a usable model to all requests that wait for it, or load it for them.

        All get it at once: if they had to ask again, another load could unload the model first.
        """
        if entry.num_holders or not entry.waiters:
            return
        if entry.endpoints is not None:
            for waiter in entry.take_waiters():
                waiter.set_result(self._used(entry))
        elif entry.is_asleep:
            message = f"The model {entry.source.name!r} sleeps. Try: POST /wake_up first"
            for waiter in entry.take_waiters():
                waiter.set_exception(ApiError(503, message, code="model_sleeping"))
        elif entry.loading is None:
            # A task of its own, as the end of one request must not end the load for others.
            entry.loading = asyncio.create_task(self._load(entry))

    async def _load(self, entry: _Entry) -> None:
        """Load a model for the requests that wait for it."""
        name = entry.source.name
        try:
            async with self._one_load:
                await self._make_room(entry)
                _log.info("loading %s", name)
                entry.model = await asyncio.to_thread(self._read, entry)
                try:
                    endpoints = self._new_endpoints(entry.model, name)
                    await endpoints.start()
                except BaseException:
                    await self._close(entry)
                    raise
                await asyncio.to_thread(self._collect)
                entry.endpoints, entry.last_used = endpoints, self._clock()
                entry.loading = None
                self._serve_waiters(entry)
        except _UnwantedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised in the requests that wait
            if isinstance(error, InterposerError):
                _log.error("%s could not be loaded: %s", name, error)
                message = f"The model {name!r} could not be loaded: {error}"
                failure: Exception = ApiError(503, message, code="model_not_loaded")
            else:
                if not isinstance(error, ApiError):
                    _log.error("%s could not be loaded", name, exc_info=error)
                failure = error
            for waiter in entry.take_waiters():
                waiter.set_exception(failure)
        finally:
            entry.loading = None
            self._serve_waiters(entry)
            self._notify()

    def _read(self, entry: _Entry) -> Model:
        """Load a model with the adapters that clients have loaded, in a thread."""
        assert entry.source.load is not None
        model = entry.source.load()
        if isinstance(model, Encoder):
            return model
        for name, path in [*entry.adapters.items()]:
            try:
                if path is not None:
                    model.load_adapter(name, path, replace=name in model.adapters)
                elif name in model.adapters:
                    model.remove_adapter(name)
            except InterposerError as error:
                _log.warning("the adapter %s is gone: %s", name, error)
                del entry.adapters[name]
        return model

    async def _make_room(self, entry: _Entry) -> None:
        """Unload other models until there is a place and memory for a model."""
        need = entry.source.memory
        while True:
            if need is not None:
                entry.need = await asyncio.to_thread(need)
            others = [other for other in self._entries.values() if other.endpoints is not None]
            has_place = len(others) < self._max_loaded
            if has_place and (entry.need is None or _fits(entry.need, others)):
                return
            evictable = [other for other in others if other.is_evictable]
            if not evictable:
                if has_place:
                    return  # the load may succeed, or fail with its own error
                raise ApiError(
                    503,
                    f"{len(others)} models are loaded and stay loaded, as many as allowed",
                    code="model_not_loaded",
                )
            # Prefer the idle model that was not used for the longest time.
            victim = min(evictable, key=lambda other: (other.users > 0, other.last_used))
            async with self._alone(victim, lambda: bool(entry.waiters)):
                if victim.is_evictable:
                    _log.info("unloading %s for %s", victim.source.name, entry.source.name)
                    await self._unload(victim)

    async def _unload(self, entry: _Entry) -> None:
        """Unload a model that no request uses."""
        endpoints, entry.endpoints = entry.endpoints, None
        if endpoints is not None:
            await endpoints.stop()
            await self._close(entry)
            _log.info("unloaded %s", entry.source.name)

    async def _close(self, entry: _Entry) -> None:
        """Free the memory of a model."""
        model, entry.model = entry.model, None
        if isinstance(model, LanguageModel):
            await asyncio.to_thread(model.close)
        del model
        await asyncio.to_thread(self._collect)


def _fits(need: MemoryNeed, others: Iterable[_Entry]) -> bool:
    """Return whether free memory holds a model beside the loaded ones."""
    # Mapped weights count as free memory until they are read, so subtract those of other models.
    taken = sum(
        other.need.weight_bytes
        for other in others
        if other.need is not None and other.need.device == need.device
    )
    room = min(need.free_bytes, need.total_bytes - taken)
    return need.weight_bytes <= _MAX_WEIGHTS_FRACTION * room


class _UnwantedError(Exception):
    """All requests that waited for a model have left before it was loaded."""
