"""The ASGI application: endpoints of the model, and endpoints about the server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
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
from interposer_serve._details import model_details
from interposer_serve._errors import ApiError, check_model, respond
from interposer_serve._guard import LOOPBACK, Guard, check_keys
from interposer_serve._limits import Limits
from interposer_serve._management import ManagementEndpoints
from interposer_serve._openapi import openapi_document
from interposer_serve._origins import check_origins, cors_middleware
from interposer_serve._telemetry import Metrics
from interposer_serve._text import TextEndpoints
from interposer_serve._vectors import VectorEndpoints

# The page loads nothing from elsewhere, and runs nothing that a model writes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(
    model: LanguageModel | Encoder,
    name: str,
    *,
    limits: Limits | None = None,
    keys: Collection[str] = (),
    hosts: Collection[str] | None = LOOPBACK,
    origins: Collection[str] = (),
    management_keys: Collection[str] = (),
) -> Starlette:
    """Return the ASGI application that serves one model.

    Once the application has started, only the application may run the model's engine.

    Args:
        model: Language model or encoder, which determines the endpoints.
        name: Name of the model for clients. Adapters keep their own names.
        limits: Limits on requests; None for the defaults of ``Limits``.
        keys: API keys, one of which each request must have. Without keys, none is needed.
        hosts: Allowed names in the Host header; None allows all.
        origins: Origins whose web pages may use the server from a browser (CORS), such as
            ``"https://app.example.org"``; ``"*"`` allows all origins and needs keys.
        management_keys: Keys for endpoints that load and unload adapters. Without such keys, the
            server has none of these endpoints.
    Raises: ConfigError: ``keys`` is not a list, a key cannot be sent in a header, an adapter has
        the name of the model, an origin is malformed, or all origins are allowed without keys.
    """
    checked_keys, checked_management = check_keys(keys), check_keys(management_keys)
    if both := checked_keys & checked_management:
        raise ConfigError(
            f"The key {next(iter(both))[:2]!r}... is an API key and a management key. "
            "Try: another key for management"
        )
    checked_origins = check_origins(origins, has_keys=bool(checked_keys))
    limits, metrics, created = limits or Limits(), Metrics(name), int(time.time())
    endpoints: TextEndpoints | VectorEndpoints
    if isinstance(model, Encoder):
        endpoints = VectorEndpoints(model, name, limits)
    else:
        if name in model.adapters:
            raise ConfigError(
                f"The model and an adapter are both called {name!r}. Try: another name of the model"
            )
        endpoints = TextEndpoints(model, name, limits, metrics)

    details = model_details(model)

    def entry(model_name: str) -> dict[str, Any]:
        return {
            "id": model_name,
            "object": "model",
            "created": created,
            "owned_by": "interposer",
            # Fields of vLLM, which clients read. An adapter has the model as its parent.
            "root": name,
            "parent": None if model_name == name else name,
            "max_model_len": endpoints.context,
            **details,
            "capabilities": getattr(endpoints, "capabilities", ["completion"]),
        }

    running = False

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        nonlocal running
        await endpoints.start()
        running = True
        yield
        running = False
        await endpoints.stop()

    async def health(_request: Request) -> Response:
        """Report that the server process is running."""
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> Response:
        """Report whether the server can answer requests."""
        trouble = endpoints.trouble if running else "the server starts or stops"
        if trouble:
            raise ApiError(503, f"Not ready: {trouble}", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def figures(_request: Request) -> Response:
        """Return the server's metrics in Prometheus' format."""
        return metrics.response()

    async def models(_request: Request) -> Response:
        """List the model and its adapters."""
        entries = [entry(model_name) for model_name in endpoints.names]
        return JSONResponse({"object": "list", "data": entries})

    async def one_model(request: Request) -> Response:
        """Describe the model or one of its adapters."""
        model_name = request.path_params["name"]
        check_model(model_name, endpoints.names)
        return JSONResponse(entry(model_name))

    async def server_version(_request: Request) -> Response:
        """Return the version of the server."""
        return JSONResponse({"version": version("interposer-serve")})

    async def explanation(_request: Request) -> Response:
        """Explain which kernels the model runs on, and why."""
        return JSONResponse(await endpoints.explanation())

    async def openapi(_request: Request) -> Response:
        """Return the OpenAPI description of all endpoints."""
        bodies = {**endpoints.bodies, **ManagementEndpoints.bodies}
        document = openapi_document(routes, bodies, has_keys=bool(checked_keys))
        return JSONResponse(document)

    management_routes = []
    if checked_management and isinstance(endpoints, TextEndpoints):
        management_routes = ManagementEndpoints(endpoints).routes
    routes = [
        *endpoints.routes,
        *management_routes,
        Route("/v1/models", models),
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
    app.state.endpoints = endpoints
    folder = getattr(model, "path", None)
    folders = () if folder is None else (Path(folder).resolve(), Path(folder).absolute())
    # Errors must not show paths of the server to clients.
    app.state.hidden = {str(path): name for path in folders}
    return app


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
