"""Sends each request to the model that its body names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from interposer.tooling import steady_time_ns
from interposer_serve._endpoints import Answer
from interposer_serve._errors import ApiError, shown
from interposer_serve._limits import Limits
from interposer_serve._models import Models
from interposer_serve._reading import BodyReader


class Dispatcher:
    """Reads the bodies of requests, and lets the model that each body names answer.

    A body without a model is for the default model.
    """

    def __init__(self, models: Models, bodies: BodyReader, limits: Limits) -> None:
        self._models = models
        self._bodies = bodies
        self._limits = limits

    @property
    def routes(self) -> list[Route]:
        """The HTTP routes of all models of the server."""
        return [
            Route(path, self._endpoint(path, method), methods=["POST"])
            for path, (method, _) in self._models.paths.items()
        ]

    def _endpoint(self, path: str, method: Answer) -> Callable[[Request], Awaitable[Response]]:
        # Metrics read the name of the endpoint, and the OpenAPI document its docstring.
        @wraps(method)
        async def endpoint(request: Request) -> Response:
            return await self._answer(path, request)

        return endpoint

    async def _answer(self, path: str, request: Request) -> Response:
        content = await self._bodies.read_object(request)
        name = content.get("model") or self._models.default
        if not isinstance(name, str):
            message = f"model is {shown(name)}; allowed is a text"
            raise ApiError(400, message, param="model", code="invalid_type")
        content["model"] = name
        elapsed = (steady_time_ns() - int(request.state.received)) / 1e9
        used = await self._models.use(name, self._limits.deadline_seconds - elapsed)
        try:
            response = await used.endpoints.answer(path, request, content)
        except BaseException:
            used.end()
            raise
        return _LastingResponse(response, used.end)


class _LastingResponse(Response):
    """A response with a function to call once it was sent, such as the end of a stream."""

    def __init__(self, response: Response, end: Callable[[], None]) -> None:
        self._response = response
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._end()
