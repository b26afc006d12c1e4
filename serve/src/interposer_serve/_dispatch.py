"""Sends each request to the model that its body names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from interposer.tooling import steady_time_ns
from interposer_serve._answering import CLIENT_CLOSED_REQUEST, disconnected
from interposer_serve._endpoints import Answer
from interposer_serve._errors import ApiError, Gone, shown
from interposer_serve._limits import Limits
from interposer_serve._models import Models
from interposer_serve._reading import BodyReader
from interposer_serve._requests import Body
from interposer_serve._served_model import Use


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
            Route(path, self._endpoint(path, method, body_type), methods=["POST"])
            for path, (method, body_type) in self._models.paths.items()
        ]

    def _endpoint(
        self, path: str, method: Answer, body_type: type[Body]
    ) -> Callable[[Request], Awaitable[Response]]:
        # Metrics read the name of the endpoint, and the OpenAPI document its docstring.
        @wraps(method)
        async def endpoint(request: Request) -> Response:
            return await self._answer(path, request, body_type)

        return endpoint

    async def _answer(self, path: str, request: Request, body_type: type[Body]) -> Response:
        # The body counts for the limit of all bodies as long as the request waits for its model.
        async with self._bodies.reading(request, body_type.media_type) as content:
            name = content.get("model")
            if name is None or name == "":
                name = self._models.default
            if not isinstance(name, str):
                message = f"model is {shown(name)}; allowed is a text"
                raise ApiError(400, message, param="model", code="invalid_type")
            content["model"] = name
            try:
                use = self._models.use_now(name) or await self._use(request, name)
            except Gone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
        try:
            response = await use.endpoints.answer(path, request, content)
        except BaseException:
            use.end()
            raise
        return _LastingResponse(response, use.end)

    async def _use(self, request: Request, name: str) -> Use:
        """Wait for a model, unless the client disconnects.

        Raises:
            ApiError: see ``Models.use``.
            Gone: The client has disconnected.
        """
        elapsed = (steady_time_ns() - int(request.state.received)) / 1e9
        waiting = asyncio.ensure_future(
            self._models.use(name, self._limits.deadline_seconds - elapsed)
        )
        gone = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Gone
            return waiting.result()
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().end()  # the wait ended when the request was cancelled
            raise
        finally:
            waiting.cancel()
            gone.cancel()


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
