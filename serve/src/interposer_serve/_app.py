"""The ASGI application: endpoints of the models, and endpoints about the server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from interposer.errors import ConfigError, InterposerError
from interposer_adapt import Encoder
from interposer_engine import LanguageModel
from interposer_serve._dispatch import Dispatcher
from interposer_serve._endpoints import Endpoints
from interposer_serve._errors import ApiError, respond
from interposer_serve._guard import LOOPBACK, Guard, check_keys
from interposer_serve._limits import Limits
from interposer_serve._management import ManagementEndpoints
from interposer_serve._media import MediaReader
from interposer_serve._media_addresses import check_media_hosts
from interposer_serve._model_source import Model, ModelSource
from interposer_serve._models import Models
from interposer_serve._openapi import openapi_document
from interposer_serve._origins import check_origins, cors_middleware
from interposer_serve._reading import BodyReader
from interposer_serve._stored_responses import StoredResponseEndpoints, StoredResponses
from interposer_serve._telemetry import Metrics, ModelMetrics
from interposer_serve._text import TextEndpoints
from interposer_serve._vectors import VectorEndpoints

# The page loads nothing from elsewhere, and runs nothing that a model writes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(
    model: LanguageModel | Encoder | Iterable[ModelSource],
    name: str | None = None,
    *,
    default: str | None = None,
    max_loaded: int | None = None,
    limits: Limits | None = None,
    keys: Collection[str] = (),
    hosts: Collection[str] | None = LOOPBACK,
    origins: Collection[str] = (),
    management_keys: Collection[str] = (),
    media_hosts: Collection[str] = (),
) -> Starlette:
    """Return the ASGI application that serves one or several models.

    Once the application has started, only the application may run the models' engines.

    Args:
        model: Language model or encoder; or several models, loaded or to be loaded on demand.
        name: Name of a single model for clients. Adapters keep their own names.
        default: Name of the model for requests that name none, which is loaded at the start; None
            for the first.
        max_loaded: Number of models that may be loaded at once; None for no limit.
        limits: Limits on requests; None for the defaults of ``Limits``.
        keys: API keys, one of which each request must have. Without keys, none is needed.
        hosts: Allowed names in the Host header; None allows all.
        origins: Origins whose web pages may use the server from a browser (CORS), such as
            ``"https://app.example.org"``; ``"*"`` allows all origins and needs keys.
        management_keys: Keys for endpoints that load and unload models and adapters and change
            weights. Without such keys, the server has none of these endpoints.
        media_hosts: Hosts, each with or without a port, from which the server fetches the pictures
            and sounds that requests name by HTTP addresses. An IP address among them may be
            private; the addresses of other hosts must be public. Without hosts, requests must hold
            the content itself.
    Raises: ConfigError: ``keys`` is not a list, a key cannot be sent in a header, two models or
        adapters have the same name, a single model has no name, ``default`` names no model, more
        models stay loaded than ``max_loaded``, an origin or media host is malformed, or all origins
        are allowed without keys.
    """
    checked_keys, checked_management = check_keys(keys), check_keys(management_keys)
    if both := checked_keys & checked_management:
        raise ConfigError(
            f"The key {next(iter(both))[:2]!r}... is an API key and a management key. "
            "Try: another key for management"
        )
    checked_origins = check_origins(origins, has_keys=bool(checked_keys))
    limits, metrics, created = limits or Limits(), Metrics(), int(time.time())
    stored = StoredResponses(limits.stored_bytes)
    media = MediaReader(limits, check_media_hosts(media_hosts))

    def new_endpoints(loaded: Model, model_name: str) -> Endpoints:
        if isinstance(loaded, Encoder):
            return VectorEndpoints(loaded, model_name, limits)
        model_metrics = ModelMetrics(metrics, model_name)
        return TextEndpoints(loaded, model_name, limits, model_metrics, stored, media)

    models = Models(
        _sources(model, name),
        new_endpoints,
        default=default,
        max_loaded=max_loaded,
        max_waiting=limits.queue,
    )

    def entry(model_name: str) -> dict[str, Any]:
        owner = models.owner(model_name)
        fields = {
            "id": model_name,
            "object": "model",
            "created": created,
            "owned_by": "interposer",
            # Fields of vLLM, which clients read. An adapter has the model as its parent.
            "root": owner,
            "parent": None if model_name == owner else owner,
            "max_model_len": None,
            "status": {"value": models.status(owner)},  # as in llama.cpp's server
        }
        if (endpoints := models.loaded(owner)) is not None:
            fields["max_model_len"] = endpoints.context
            fields |= {**endpoints.details, "capabilities": [*endpoints.capabilities]}
        return fields

    running = False

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        nonlocal running
        try:
            await models.start()
            running = True
            yield
        finally:
            running = False
            await models.stop()

    async def health(_request: Request) -> Response:
        """Report that the server process is running."""
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> Response:
        """Report whether the server can answer requests."""
        trouble = models.trouble if running else "the server starts or stops"
        if trouble:
            raise ApiError(503, f"Not ready: {trouble}", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def figures(_request: Request) -> Response:
        """Return the server's metrics in Prometheus' format."""
        return metrics.response()

    async def all_models(_request: Request) -> Response:
        """List the models and adapters of the server."""
        entries = [entry(model_name) for model_name in models.names]
        return JSONResponse({"object": "list", "data": entries})

    async def one_model(request: Request) -> Response:
        """Describe a model or an adapter."""
        return JSONResponse(entry(request.path_params["name"]))

    async def server_version(_request: Request) -> Response:
        """Return the version of the server."""
        return JSONResponse({"version": version("interposer-serve")})

    async def explanation(request: Request) -> Response:
        """Explain which kernels a model runs on, and why: the default one, or ``?model=NAME``."""
        model_name = request.query_params.get("model") or models.default
        endpoints = models.loaded(model_name)
        if endpoints is None:
            message = f"The model {model_name!r} is {models.status(model_name)}"
            raise ApiError(409, message, param="model", code="model_not_loaded")
        return JSONResponse(await endpoints.explanation())

    async def openapi(_request: Request) -> Response:
        """Return the OpenAPI description of all endpoints."""
        bodies = {path: body_type for path, (_, body_type) in models.paths.items()}
        bodies |= ManagementEndpoints.bodies
        document = openapi_document(routes, bodies, has_keys=bool(checked_keys))
        return JSONResponse(document)

    bodies_reader = BodyReader(limits, checked_origins)
    routes = [
        *Dispatcher(models, bodies_reader, limits).routes,
        *StoredResponseEndpoints(stored).routes,
        *(ManagementEndpoints(models, bodies_reader, limits).routes if checked_management else ()),
        Route("/v1/models", all_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/version", server_version),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", figures),
        Route("/explanation", explanation),
        Route("/openapi.json", openapi),
        *_page(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            *cors_middleware(checked_origins),
            Middleware(
                Guard,
                metrics=metrics,
                keys=checked_keys,
                management_keys=checked_management,
                hosts=_names(hosts),
            ),
        ],
        exception_handlers={
            ApiError: respond,
            InterposerError: respond,
            HTTPException: _respond_to_unknown([route.path for route in routes]),
            Exception: respond,
        },
        lifespan=lifespan,
    )
    app.state.models = models
    return app


def _sources(
    model: LanguageModel | Encoder | Iterable[ModelSource], name: str | None
) -> list[ModelSource]:
    """Return the sources of the models of ``application``.

    Raises: ConfigError: a single model has no name, or several have one.
    """
    if isinstance(model, Encoder | LanguageModel):
        if name is None:
            raise ConfigError("The model has no name for clients. Try: name='NAME'")
        return [ModelSource(name=name, model=model)]
    if name is not None:
        raise ConfigError(f"name is {name!r}, but each ModelSource has its own. Try: default")
    return [*model]


def _names(hosts: Collection[str] | None) -> frozenset[str] | None:
    return None if hosts is None else frozenset(host.lower() for host in hosts)


def _page() -> Iterator[Route]:
    """Yield the routes of the chat page in the browser."""
    folder = files("interposer_serve") / "page"
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "text/javascript"),
    ):
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        content = Response((folder / name).read_bytes(), headers=headers, media_type=kind)
        yield Route(path, partial(_send_content, content))


async def _send_content(content: Response, _request: Request) -> Response:
    return content


def _respond_to_unknown(paths: list[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return an exception handler whose 404 responses list all endpoints."""

    async def respond_to(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            endpoints = ", ".join(sorted(paths))
            target = f"{request.method} {request.url.path!r:.200}"
            message = f"There is no {target}; there are {endpoints}"
            error = ApiError(404, message, code="unknown_url")
        return await respond(request, error)

    return respond_to
