"""Endpoints for management keys: loading and unloading of models and adapters, new weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from interposer_engine import Meeting, WeightsFrom
from interposer_serve._endpoints import Endpoints
from interposer_serve._errors import ApiError, shown
from interposer_serve._limits import Limits
from interposer_serve._models import Models
from interposer_serve._reading import BodyReader
from interposer_serve._requests import Body
from interposer_serve._text import TextEndpoints

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOAD, UNLOAD, UPDATE = "/models/load", "/models/unload", "/update_weights"
SLEEP, WAKE, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
PATHS = frozenset({LOAD_ADAPTER, UNLOAD_ADAPTER, LOAD, UNLOAD, UPDATE, SLEEP, WAKE, IS_SLEEPING})
B = TypeVar("B", bound=Body)


class LoadAdapterBody(Body):
    """Request body of ``/v1/load_lora_adapter``, as in vLLM."""

    lora_name: str = Field(min_length=1, description="the name that clients request as the model")
    lora_path: str = Field(min_length=1, description="a folder of the server that PEFT saved")
    load_inplace: bool = Field(False, description="true or false")


class UnloadAdapterBody(Body):
    """Request body of ``/v1/unload_lora_adapter``, as in vLLM."""

    lora_name: str = Field(min_length=1, description="the name of an adapter")


class ModelBody(Body):
    """Request body of ``/models/load`` and ``/models/unload``, as in llama.cpp's server."""


class UpdateWeightsBody(Body):
    """Request body of ``/update_weights``: a folder of the server, or a meeting with a trainer."""

    path: str | None = Field(None, description="a folder of the server with safetensors files")
    address: str | None = Field(
        None, description="the address of the meeting, such as tcp://10.0.0.1:29500"
    )
    rank: int = Field(1, ge=0, description="the rank of the server in the meeting")
    size: int = Field(2, ge=2, description="the number of processes of the meeting")
    source: int = Field(0, ge=0, description="the rank of the trainer in the meeting")
    timeout_seconds: float = Field(300.0, gt=0, description="a number above 0")


class ManagementEndpoints:
    """The endpoints that load and unload models and adapters, and replace weights.

    A body or query without a model is for the default model.
    """

    bodies: Mapping[str, type[Body]] = {
        LOAD_ADAPTER: LoadAdapterBody,
        UNLOAD_ADAPTER: UnloadAdapterBody,
        LOAD: ModelBody,
        UNLOAD: ModelBody,
        UPDATE: UpdateWeightsBody,
    }

    def __init__(self, models: Models, bodies: BodyReader, limits: Limits) -> None:
        self._models = models
        self._bodies = bodies
        self._seconds = limits.deadline_seconds

    @property
    def routes(self) -> list[Route]:
        """The HTTP routes of the endpoints."""
        return [
            Route(LOAD_ADAPTER, self.load_adapter, methods=["POST"]),
            Route(UNLOAD_ADAPTER, self.unload_adapter, methods=["POST"]),
            Route(LOAD, self.load_model, methods=["POST"]),
            Route(UNLOAD, self.unload_model, methods=["POST"]),
            Route(UPDATE, self.update_weights, methods=["POST"]),
            Route(SLEEP, self.sleep, methods=["POST"]),
            Route(WAKE, self.wake, methods=["POST"]),
            Route(IS_SLEEPING, self.is_sleeping),
        ]

    async def load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter, or replace one: ``/v1/load_lora_adapter``."""
        body = await self._read(request, LoadAdapterBody)
        owner = self._models.owner(body.model)
        use = await self._models.use(owner, self._seconds)
        try:
            text = _text(use.endpoints)
            async with self._models.adapter_changes:
                self._models.check_new_adapter(owner, body.lora_name)
                await text.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
                self._models.record_adapter(owner, body.lora_name, body.lora_path)
        finally:
            use.end()
        return JSONResponse({"status": "loaded", "lora_name": body.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        """Remove a LoRA adapter that no request uses: ``/v1/unload_lora_adapter``."""
        body = await self._read(request, UnloadAdapterBody)
        owner = self._models.owner(body.model)
        use = await self._models.use(owner, self._seconds)
        try:
            async with self._models.adapter_changes:
                await _text(use.endpoints).remove_adapter(body.lora_name)
                self._models.record_adapter(owner, body.lora_name, None)
        finally:
            use.end()
        return JSONResponse({"status": "removed", "lora_name": body.lora_name})

    async def load_model(self, request: Request) -> Response:
        """Load a model: ``/models/load``."""
        body = await self._read(request, ModelBody)
        (await self._models.use(body.model, self._seconds)).end()
        return self._status(body.model)

    async def unload_model(self, request: Request) -> Response:
        """Unload a model after its running requests: ``/models/unload``."""
        body = await self._read(request, ModelBody)
        await self._models.unload(body.model)
        return self._status(body.model)

    async def sleep(self, request: Request) -> Response:
        """Unload a model until a client wakes it: ``/sleep?model=NAME``."""
        name = self._named(request)
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            message = f"level is {shown(level)}; allowed is 1 or 2, which have the same effect"
            raise ApiError(400, message, param="level", code="invalid_value")
        await self._models.sleep(name)
        return self._status(name)

    async def wake(self, request: Request) -> Response:
        """Load a model that sleeps: ``/wake_up?model=NAME``."""
        name = self._named(request)
        await self._models.wake(name, self._seconds)
        return self._status(name)

    async def is_sleeping(self, request: Request) -> Response:
        """Return whether a model sleeps: ``/is_sleeping?model=NAME``."""
        status = self._models.status(self._named(request))
        return JSONResponse({"is_sleeping": status == "sleeping"})

    async def update_weights(self, request: Request) -> Response:
        """Replace weights of a model once its requests have ended: ``/update_weights``."""
        body = await self._read(request, UpdateWeightsBody)
        if (body.path is None) == (body.address is None):
            message = "Give either path or address"
            raise ApiError(400, message, param="path", code="invalid_value")
        async with self._models.updating(body.model, self._seconds) as endpoints:
            text = _text(endpoints)
            if body.path is not None:
                moved = await text.update_weights(body.path)
            else:
                meeting = Meeting(body.address or "", body.rank, body.size)
                moved = await text.update_weights(
                    WeightsFrom(meeting, body.source, body.timeout_seconds)
                )
        return JSONResponse({"status": "updated", "moved": [*moved]})

    def _named(self, request: Request) -> str:
        return request.query_params.get("model") or self._models.default

    def _status(self, name: str) -> Response:
        owner = self._models.owner(name)
        return JSONResponse({"model": owner, "status": self._models.status(owner)})

    async def _read(self, request: Request, body_type: type[B]) -> B:
        async with self._bodies.reading(request) as content:
            if content.get("model") in (None, ""):
                content["model"] = self._models.default
            return body_type.read(content)


def _text(endpoints: Endpoints) -> TextEndpoints:
    """Return the endpoints of a model that generates text.

    Raises: ApiError: the model is an encoder.
    """
    if not isinstance(endpoints, TextEndpoints):
        message = f"The model {endpoints.name!r} is an encoder, which cannot be changed"
        raise ApiError(400, message, param="model", code="not_honoured")
    return endpoints
