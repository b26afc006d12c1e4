"""Streaming responses, which end when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from interposer_engine import Generation
from interposer_serve._errors import Gone, api_error

_log = logging.getLogger("interposer")
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def watched(request: Request, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation when the client disconnects, or at the end of the block."""
    watch = asyncio.create_task(_cancel_on_disconnect(request, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.fail(Gone())


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.fail(Gone())


class EventStream(Response):
    """A stream of server-sent events, which cancels the generation at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        # Without x-accel-buffering, nginx would hold events back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Starlette for the empty body
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and an error as the last event."""
        try:
            await self._send(send)
        finally:
            # The event generator does this too, but not if it never started.
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
            except Exception as error:  # noqa: BLE001 - the status was sent already, so send an event
                last_event = api_error(error)
                if last_event.status == 500:
                    _log.error("a stream failed", exc_info=error)
                await send(
                    {"type": "http.response.body", "body": last_event.event(), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})
