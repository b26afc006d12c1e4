"""The application: endpoints of a model, and those of the server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
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
from interposer_models import Encoder, LanguageModel
from interposer_serve._errors import ApiError, check_model, respond
from interposer_serve._guard import LOOPBACK, Guard, check_keys
from interposer_serve._limits import Limits
from interposer_serve._metrics import Metrics
from interposer_serve._openapi import description
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
) -> Starlette:
    """Return the application that serves a model; any ASGI server runs it.

    The model belongs to it from its start on: nobody else may run its engine.

    Args:
        model: writes text, or makes vectors; endpoints differ accordingly.
        name: by which clients ask for it. They ask for an adapter of it by the adapter's name.
        limits: bounds on requests.
        keys: one of which every request has to bear; none asks for none.
        hosts: names by which clients may call the server; None allows all.
    Raises: ConfigError: keys are no list, one is empty or no ASCII, or an adapter has the name of
        the model.
    """
    checked_keys = check_keys(keys)
    limits, metrics, created = limits or Limits(), Metrics(), int(time.time())
    endpoints: TextEndpoints | VectorEndpoints
    if isinstance(model, Encoder):
        endpoints = VectorEndpoints(model, name, limits)
    else:
        if name in model.adapters:
            raise ConfigError(
                f"The model and an adapter are both called {name!r}. Try: another name of the model"
            )
        endpoints = TextEndpoints(model, name, limits, metrics)

    def entry(of: str) -> dict[str, Any]:
        base = {} if of == name else {"parent": name}
        return {
            "id": of,
            "object": "model",
            "created": created,
            "owned_by": "interposer",
            "max_model_len": endpoints.context,
            **base,
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
        """Say that the process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> Response:
        """Say whether requests would be answered."""
        trouble = endpoints.trouble if running else "the server starts or stops"
        if trouble:
            raise ApiError(503, f"Not ready: {trouble}", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def figures(_request: Request) -> Response:
        """Tell the figures for Prometheus."""
        return metrics.response()

    async def models(_request: Request) -> Response:
        """Tell the names by which clients ask for the model and its adapters."""
        entries = [entry(each) for each in endpoints.names]
        return JSONResponse({"object": "list", "data": entries})

    async def one_model(request: Request) -> Response:
        """Tell of one of them."""
        asked = request.path_params["name"]
        check_model(asked, endpoints.names)
        return JSONResponse(entry(asked))

    async def explanation(_request: Request) -> Response:
        """Tell what the model runs on, and why."""
        return JSONResponse(await endpoints.explanation())

    async def openapi(_request: Request) -> Response:
        """Describe the endpoints as OpenAPI."""
        return JSONResponse(description(routes, endpoints.bodies, has_keys=bool(checked_keys)))

    routes = [
        *endpoints.routes,
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", figures),
        Route("/explanation", explanation),
        Route("/openapi.json", openapi),
        *_page(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, metrics=metrics, keys=checked_keys, hosts=_names(hosts))],
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
    app.state.hidden = {str(each): name for each in folders}
    return app


def _names(hosts: Collection[str] | None) -> frozenset[str] | None:
    return None if hosts is None else frozenset(hosts)


def _page() -> Iterator[Route]:
    """Yield the routes of the page."""
    folder = files("interposer_serve") / "page"
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "text/javascript"),
    ):
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        content = Response((folder / name).read_bytes(), headers=headers, media_type=kind)
        yield Route(path, partial(_sent, content))


async def _sent(content: Response, _request: Request) -> Response:
    return content


def _respond_to_unknown(paths: list[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return what tells clients which endpoints there are."""

    async def respond_to(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            known = ", ".join(sorted(paths))
            asked = f"{request.method} {request.url.path!r:.200}"
            error = ApiError(404, f"There is no {asked}; there are {known}", code="unknown_url")
        return await respond(request, error)

    return respond_to
