"""The models of a server: loaded on demand, unloaded when they are idle or memory is short."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from interposer.errors import InterposerError, near_names
from interposer_adapt import Encoder
from interposer_engine import LanguageModel, MemoryNeed
from interposer_serve._endpoints import Answer, Endpoints
from interposer_serve._errors import ApiError
from interposer_serve._model_source import Model, ModelSource, check_sources
from interposer_serve._requests import Body
from interposer_serve._served_model import GiveUp, ServedModel, Use
from interposer_serve._threads import in_daemon_thread

# Beside weights, a model needs memory for its caches and steps.
_MAX_WEIGHTS_FRACTION = 0.8
# After a failed load, other models are not unloaded for another try during this time.
_RETRY_SECONDS = 10.0
_CLOSE_SECONDS = 5.0  # for a model to be closed at the end of the server
_log = logging.getLogger("interposer")


class Models:
    """The models of a server.

    All methods run in the event loop of the server.

    Attributes:
        default: Name of the model for requests that name none.
        adapter_changes: Held while a client loads or removes an adapter.
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
            max_waiting: Number of requests that may wait for one model; at least 1 may.
            clock: Returns the time in seconds, from any start.
        Raises: ConfigError: as ``check_sources``, or an adapter has the name of its model.
        """
        sources = [*sources]
        check_sources(sources, default, max_loaded)
        self.default = sources[0].name if default is None else default
        self.adapter_changes = asyncio.Lock()
        self._max_loaded = len(sources) if max_loaded is None else max_loaded
        self._new_endpoints = new_endpoints
        self._max_waiting = max(1, max_waiting)
        self._clock = clock
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Event()
        self._expiry: asyncio.Task[None] | None = None
        self._stopping: ApiError | None = None
        # The default model is listed first, where clients look for a model.
        sources.sort(key=lambda source: source.name != self.default)
        self._models: dict[str, ServedModel] = {}
        for source in sources:
            model = self._models[source.name] = ServedModel(source, self._changed, clock)
            if source.model is not None:
                model.model = source.model
                model.endpoints = new_endpoints(source.model, source.name)

    @property
    def paths(self) -> dict[str, tuple[Answer, type[Body]]]:
        """The endpoints of all models: method and type of the body, by path.

        The paths of a model that is not loaded yet are all of its kind.
        """
        paths: dict[str, tuple[Answer, type[Body]]] = {}
        for model in self._models.values():
            kind, endpoints = model.source.kind, model.endpoints
            available = kind.paths if endpoints is None else endpoints.available
            paths |= {path: kind.paths[path] for path in kind.paths if path in available}
        return paths

    @property
    def folders(self) -> Mapping[str, str]:
        """Names for clients by folders of models and adapters, which clients must not see."""
        folders: dict[str, str] = {}
        for model in self._models.values():
            folders |= _hidden(model.source.path, model.name)
            folders |= _hidden(getattr(model.model, "path", None), model.name)
            for name, path in {**model.source.adapters, **model.adapters}.items():
                folders |= _hidden(path, name)
        # A folder can lie in another one.
        return dict(sorted(folders.items(), key=lambda item: len(item[0]), reverse=True))

    @property
    def names(self) -> list[str]:
        """Names under which models and adapters are served."""
        return [name for model in self._models.values() for name in model.names]

    def owner(self, name: str) -> str:
        """Return the name of the model with a name, or with an adapter of that name.

        Raises: ApiError: no model and no adapter has the name.
        """
        return self._named(name).name

    def status(self, name: str) -> str:
        """Return the state of a model: loaded, loading, unloaded or sleeping."""
        return self._named(name).status

    def loaded(self, name: str) -> Endpoints | None:
        """Return the endpoints of a model; None if it is not loaded."""
        return self._named(name).endpoints

    @property
    def _loaded(self) -> list[Endpoints]:
        models = self._models.values()
        return [model.endpoints for model in models if model.endpoints is not None]

    @property
    def num_unfinished(self) -> int:
        """Number of answers that run or wait, and of requests that wait for a model."""
        num_waiting = sum(model.num_waiting for model in self._models.values())
        return num_waiting + sum(endpoints.num_unfinished for endpoints in self._loaded)

    @property
    def trouble(self) -> str:
        """Reason why requests to a loaded model would fail; "" if no reason is known."""
        for model in self._models.values():
            if model.endpoints is not None and (trouble := model.endpoints.trouble):
                return trouble if len(self._models) == 1 else f"{model.name}: {trouble}"
        return ""

    @property
    def is_stuck(self) -> bool:
        """Whether no unfinished answer can finish, because all their models have failed."""
        unfinished = [endpoints for endpoints in self._loaded if endpoints.num_unfinished]
        return bool(unfinished) and all(endpoints.trouble for endpoints in unfinished)

    def end_answers(self) -> None:
        """End every unfinished answer with an error, and refuse new requests."""
        self._stopping = ApiError(503, "The server stops", code="server_ends")
        for model in self._models.values():
            model.refuse(self._stopping)
        for endpoints in self._loaded:
            endpoints.end_answers()

    def freeze_objects(self) -> None:
        """Keep the garbage collector from scanning the loaded models, which stops all threads.

        This is for servers that own their process: the collector then ignores all other objects
        that exist at that moment, too.
        """
        gc.collect()
        gc.freeze()
        for model in self._models.values():
            model.is_frozen = model.model is not None

    async def start(self) -> None:
        """Load the default model and those that stay loaded, and watch for idle ones."""
        self._stopping = None
        for model in self._models.values():
            model.refusal = None
            if model.endpoints is not None:
                await model.endpoints.start()
                model.last_used = self._clock()
            elif model.name == self.default or model.source.keep_loaded:
                (await self._wait(model)).end()
        if any(model.source.idle_seconds is not None for model in self._models.values()):
            self._expiry = asyncio.create_task(self._watch_idle())

    async def stop(self) -> None:
        """End the threads of all models, and close the models that the server loaded.

        A load that runs is abandoned, and its model is closed once it is loaded.
        """
        self.end_answers()
        for task in (self._expiry, *[model.loading for model in self._models.values()]):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
        await asyncio.gather(*map(self._end, self._models.values()))

    async def _end(self, model: ServedModel) -> None:
        """End the threads of a model, and close the model unless it belongs to the caller."""
        if model.endpoints is not None:
            await model.endpoints.stop()
        if model.source.model is None:
            model.endpoints = None
            # A model that waits for a trainer cannot be closed.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._close(model)

    def use_now(self, name: str) -> Use | None:
        """Start a use of a model; return None if a request must wait for the model.

        Raises: ApiError: there is no such model.
        """
        return self._named(name).use()

    async def use(self, name: str, seconds: float) -> Use:
        """Load a model unless it is loaded, and start a use.

        Args:
            name: Name of the model, or of one of its adapters.
            seconds: Longest time to wait.
        Raises: ApiError: there is no such model, it sleeps or cannot be loaded, too many requests
            wait for it, or the time has passed.
        """
        model = self._named(name)
        if model.num_waiting >= self._max_waiting:
            message = f"{model.num_waiting} requests wait for {model.name!r}. Try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "5"})
        try:
            async with asyncio.timeout(seconds) as timeout:
                return await self._wait(model)
        except TimeoutError:
            if not timeout.expired():
                raise  # an error of the load
            message = f"The model {model.name!r} was not available within {seconds:.0f} s"
            raise ApiError(504, message, code="deadline_exceeded") from None

    async def _wait(self, model: ServedModel) -> Use:
        return model.use() or await model.wait(lambda: self._advance(model))

    def _advance(self, model: ServedModel) -> None:
        """Do what the requests that wait for a model need next."""
        if model.is_changing or not model.num_waiting:
            return
        if self._stopping is not None:
            model.fail(self._stopping)
        elif model.endpoints is not None:
            model.serve_waiters()
        elif model.is_asleep:
            message = f"The model {model.name!r} sleeps. Try: POST /wake_up?model={model.name}"
            model.fail(ApiError(503, message, code="model_sleeping"))
        elif model.loading is None:
            # A task of its own, as the end of one request must not end the load for others.
            model.loading = asyncio.create_task(self._load(model))

    @asynccontextmanager
    async def _changing(self, model: ServedModel) -> AsyncIterator[None]:
        """Change a model in a ``with`` block, and serve the requests that have waited."""
        try:
            async with model.change():
                yield
        finally:
            self._advance(model)

    async def unload(self, name: str) -> None:
        """Unload a model after its running requests; the next request loads the model again.

        Raises: ApiError: there is no such model, or it cannot be loaded again.
        """
        await self._remove(self._named(name), falls_asleep=False)

    async def sleep(self, name: str) -> None:
        """Unload a model after its running requests; later requests fail until ``wake``.

        Raises: ApiError: there is no such model, or it cannot be loaded again.
        """
        await self._remove(self._named(name), falls_asleep=True)

    async def _remove(self, model: ServedModel, *, falls_asleep: bool) -> None:
        if model.source.load is None:
            message = f"The model {model.name!r} stays loaded: the server cannot load it again"
            raise ApiError(400, message, param="model", code="not_honoured")
        async with self._changing(model):
            await model.load_ends()
            await model.requests_end()
            model.is_asleep = model.is_asleep or falls_asleep
            await self._unload(model)
            model.is_updated = False

    async def wake(self, name: str, seconds: float) -> None:
        """Load a model that sleeps.

        Raises: ApiError: as ``use``.
        """
        model = self._named(name)
        async with self._changing(model):
            model.is_asleep = False
        (await self.use(name, seconds)).end()

    @asynccontextmanager
    async def updating(self, name: str, seconds: float) -> AsyncIterator[Endpoints]:
        """Change the weights of a model in the ``with`` block, while no request uses the model.

        Afterwards the server does not unload the model on its own, as its files hold other weights.

        Raises: ApiError: as ``use``.
        """
        model = self._named(name)
        while True:
            (await self.use(name, seconds)).end()
            async with self._changing(model):
                await model.requests_end()
                if model.endpoints is not None:
                    yield model.endpoints
                    model.is_updated = True
                    return

    def record_adapter(self, name: str, adapter: str, path: str | None) -> None:
        """Record that clients loaded an adapter from a folder, or removed it, for later loads.

        Args:
            name: Name of the model.
            path: The folder; None for an adapter that was removed.
        """
        self._models[name].adapters[adapter] = path

    def check_new_adapter(self, name: str, adapter: str) -> None:
        """Check that no other model or adapter has the name of a new adapter of a model.

        Raises: ApiError: another model, or an adapter of another model, has that name.
        """
        for model in self._models.values():
            if adapter in (model.names if model.name != name else [name]):
                message = f"lora_name is {adapter!r:.100}, which is the name of another model or "
                message += "adapter. Try: another name"
                raise ApiError(400, message, param="lora_name", code="invalid_value")

    async def unload_idle(self) -> None:
        """Unload the models that were idle for longer than their sources allow."""
        for model in self._models.values():
            if self._seconds_until_idle(model) == 0:
                async with self._changing(model):
                    await self._unload(model)

    def _seconds_until_idle(self, model: ServedModel) -> float | None:
        """Return the time until a model may be unloaded for being idle; None for never."""
        allowed = model.source.idle_seconds
        if allowed is None or not model.is_evictable or model.num_users:
            return None
        return max(0.0, model.last_used + allowed - self._clock())

    async def _watch_idle(self) -> None:
        while True:
            waits = [self._seconds_until_idle(model) for model in self._models.values()]
            next_wait = min((wait for wait in waits if wait is not None), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(next_wait):
                    await self._changed.wait()
            try:
                await self.unload_idle()
            except Exception:  # noqa: BLE001 - other models must be watched all the same
                _log.exception("an idle model could not be unloaded")

    def _named(self, name: str) -> ServedModel:
        if (model := self._models.get(name)) is not None:
            return model
        for model in self._models.values():
            if name in model.names:
                return model
        message = f"model is {name!r:.100}; allowed is {near_names(name, self.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def _load(self, model: ServedModel) -> None:
        """Load a model for the requests that wait for it."""
        try:
            while model.endpoints is None:
                async with self._one_load:
                    if await self._make_room(model):
                        await self._start(model)
                        continue
                # Other models can be loaded meanwhile.
                await self._changed.wait()
            model.serve_waiters()
        except GiveUp:
            model.loading = None
            self._advance(model)
        except asyncio.CancelledError:
            model.fail(self._stopping or ApiError(503, f"{model.name!r} was not loaded"))
            raise
        except Exception as error:  # noqa: BLE001 - raised in the requests that wait
            model.fail(error)
        finally:
            model.loading = None
            model.notify()

    async def _start(self, model: ServedModel) -> None:
        """Load a model for which there is room, and start its endpoints.

        Raises: ApiError: the model cannot be loaded.
        """
        _log.info("loading %s", model.name)
        try:
            await self._close(model)  # an earlier end may have been interrupted
            model.model = await in_daemon_thread(lambda: self._read(model), _close)
            try:
                endpoints = self._new_endpoints(model.model, model.name)
                await endpoints.start()
            except BaseException:
                await self._close(model)
                raise
        except Exception as error:
            model.failure, model.failed_at = _load_error(model, error), self._clock()
            raise model.failure from error
        model.endpoints, model.last_used, model.failure = endpoints, self._clock(), None

    def _read(self, model: ServedModel) -> Model:
        """Load a model with the adapters that clients have loaded, in a thread."""
        assert model.source.load is not None
        loaded = model.source.load()
        if isinstance(loaded, Encoder):
            return loaded
        for name, path in [*model.adapters.items()]:
            try:
                if path is not None:
                    loaded.load_adapter(name, path, replace=name in loaded.adapters)
                elif name in loaded.adapters:
                    loaded.remove_adapter(name)
            except InterposerError as error:
                _log.warning("%s is loaded without its adapter %s: %s", model.name, name, error)
        return loaded

    async def _make_room(self, model: ServedModel) -> bool:
        """Unload other models until there is a place and memory for a model.

        Returns: False if another model must first end a change, such as an update.
        Raises:
            GiveUp: no request waits for the model any longer.
            ApiError: all places are taken by models that stay loaded, or the model could not be
                loaded a moment ago.
        """
        while True:
            if not model.num_waiting:
                raise GiveUp
            if model.source.memory is not None:
                model.need = await in_daemon_thread(model.source.memory)
            residents = [
                resident
                for resident in self._models.values()
                if resident is not model and resident.model is not None
            ]
            has_place = len(residents) < self._max_loaded
            if has_place and (model.need is None or _fits(model.need, residents)):
                return True
            if model.failure is not None and self._clock() < model.failed_at + _RETRY_SECONDS:
                raise model.failure
            evictable = [resident for resident in residents if resident.is_evictable]
            if evictable:
                # Prefer the idle model that was not used for the longest time.
                victim = min(
                    evictable, key=lambda resident: (resident.num_users > 0, resident.last_used)
                )
                with suppress(GiveUp):
                    await self._evict(victim, model, residents)
            elif any(resident.is_changing for resident in residents):
                return False
            elif has_place:
                return True  # the load may succeed, or fail with its own error
            else:
                raise ApiError(
                    503,
                    f"{len(residents)} models stay loaded, which is all that max_loaded allows. "
                    "Try: POST /models/unload with a model whose weights were updated",
                    code="model_not_loaded",
                )

    async def _evict(
        self, victim: ServedModel, model: ServedModel, residents: Iterable[ServedModel]
    ) -> None:
        """Unload a model for another one, once its requests have ended.

        Raises: GiveUp: no request waits for the other model, or a third model is idle meanwhile.
        """

        def gives_up() -> bool:
            return not model.num_waiting or any(
                resident.is_evictable and not resident.num_users for resident in residents
            )

        async with self._changing(victim):
            await victim.requests_end(gives_up)
            _log.info("unloading %s for %s", victim.name, model.name)
            await self._unload(victim)

    async def _unload(self, model: ServedModel) -> None:
        """Unload a model that no request uses."""
        endpoints, model.endpoints = model.endpoints, None
        if endpoints is not None:
            await endpoints.stop()
            del endpoints  # refers to the model
            await self._close(model)
            _log.info("unloaded %s", model.name)

    async def _close(self, model: ServedModel) -> None:
        """Free the memory of a model."""
        if model.model is None:
            return
        # The thread may still refer to its function afterwards, so the function is no encoder's: a
        # closed language model has freed its weights, an encoder is freed by the collection below.
        if isinstance(model.model, LanguageModel):
            await in_daemon_thread(model.model.close)
            if not model.is_frozen:
                model.model = None
                return
        model.model = None
        if model.is_frozen:
            gc.unfreeze()
        # Finalizers run in the first collection, and what they refer to is freed in the second.
        await in_daemon_thread(lambda: (gc.collect(), gc.collect()))
        if model.is_frozen:
            gc.freeze()
            model.is_frozen = False


def _hidden(path: str | Path | None, name: str) -> dict[str, str]:
    """Return a name by the spellings of a folder in errors."""
    if path is None:
        return {}
    # Only whole paths: a relative one may be part of any word.
    return dict.fromkeys((str(Path(path).resolve()), str(Path(path).absolute())), name)


def _load_error(model: ServedModel, error: Exception) -> ApiError:
    """Log the error of a load, and return the error for clients."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, InterposerError):
        _log.error("%s could not be loaded", model.name, exc_info=error)
        reason = "the server's log has the reason"
    else:
        _log.error("%s could not be loaded: %s", model.name, error)
        reason = str(error)
        for folder, name in _hidden(model.source.path, model.name).items():
            reason = reason.replace(folder, name)
    message = f"The model {model.name!r} could not be loaded: {reason}"
    return ApiError(503, message, code="model_not_loaded")


def _close(loaded: Model) -> None:
    if isinstance(loaded, LanguageModel):
        loaded.close()


def _fits(need: MemoryNeed, residents: Iterable[ServedModel]) -> bool:
    """Return whether a model fits beside loaded models, or would not fit without them either."""
    limit = _MAX_WEIGHTS_FRACTION
    # Mapped weights count as free memory until they are read, so subtract those of loaded models.
    num_bytes = sum(
        resident.need.weight_bytes
        for resident in residents
        if resident.need is not None and resident.need.device == need.device
    )
    room = min(need.free_bytes, need.total_bytes - num_bytes)
    is_too_large = need.weight_bytes > limit * need.total_bytes
    return is_too_large or need.weight_bytes <= limit * room
