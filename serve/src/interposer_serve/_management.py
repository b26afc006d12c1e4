"""Endpoints that load and unload adapters; only management keys may use these endpoints."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from interposer_serve._errors import ApiError
from interposer_serve._requests import Body
from interposer_serve._text import TextEndpoints

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset({LOAD, UNLOAD})


class _Body(Body):
    model: str = Field("", description="a text")


class LoadAdapterBody(_Body):
    """Request body of ``/v1/load_lora_adapter``, as in vLLM."""

    lora_name: str = Field(min_length=1, description="the name that clients request as the model")
    lora_path: str = Field(min_length=1, description="a folder of the server that PEFT saved")
    load_inplace: bool = Field(False, description="true or false")


class UnloadAdapterBody(_Body):
    """Request body of ``/v1/unload_lora_adapter``, as in vLLM."""

    lora_name: str = Field(min_length=1, description="the name of an adapter")


class ManagementEndpoints:
    """The endpoints that load and unload LoRA adapters of a model."""

    bodies: Mapping[str, type[Body]] = {LOAD: LoadAdapterBody, UNLOAD: UnloadAdapterBody}

    def __init__(self, endpoints: TextEndpoints) -> None:
        self._endpoints = endpoints

    @property
    def routes(self) -> list[Route]:
        """The HTTP routes of the endpoints."""
        return [
            Route(LOAD, self.load_adapter, methods=["POST"]),
            Route(UNLOAD, self.unload_adapter, methods=["POST"]),
        ]

    async def load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter, or replace one: ``/v1/load_lora_adapter``."""
        body = await self._endpoints.read(request, LoadAdapterBody)
        if body.lora_name == self._endpoints.name:
            message = f"lora_name is {body.lora_name!r:.100}, the name of the model. Try: another"
            raise ApiError(400, message, param="lora_name", code="invalid_value")
        await self._endpoints.load_adapter(
            body.lora_name, body.lora_path, replace=body.load_inplace
        )
        return JSONResponse({"status": "loaded", "lora_name": body.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        """Remove a LoRA adapter that no request uses: ``/v1/unload_lora_adapter``."""
        body = await self._endpoints.read(request, UnloadAdapterBody)
        await self._endpoints.remove_adapter(body.lora_name)
        return JSONResponse({"status": "removed", "lora_name": body.lora_name})
