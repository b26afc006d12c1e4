"""Responses that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from interposer_models import Generation
from interposer_serve._errors import Gone, api_error

_log = logging.getLogger("interposer")
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def watched(request: Request, generation: Generation) -> AsyncIterator[None]:
    """Close a generation when its client leaves, and when the block ends."""
    watch = asyncio.create_task(_leave(request, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.fail(Gone())


async def _leave(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.fail(Gone())


class EventStream(Response):
    """A stream of server-sent events, with whose end a generation is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come; an error is the last one."""
        try:
            await self._send(send)
        finally:
            # The events do so too, but not where they never began.
            self._generation.fail(Gone())

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async with aclosing(self._events) as events:
            try:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except Gone:
                return
            except Exception as error:  # noqa: BLE001 - the status was sent, so it is told in here
                told = api_error(error)
                if told.status == 500:
                    _log.error("a stream failed", exc_info=error)
                await send({"type": "http.response.body", "body": told.event(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
