"""The server of the command: it says where it listens, and ends in an order that clients see."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from interposer_serve._connections import protocol
from interposer_serve._limits import ConnectionLimits

_LAST_SECONDS = 2  # in which clients are told that the server ends
_POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """Serves an application until a signal comes, and then lets its answers end.

    The first Ctrl-C or SIGTERM lets answers end for a while, the second one ends them. Answers that
    are left get an error.

    Attributes:
        is_forced: whether a second signal came.
    """

    def __init__(
        self,
        app: Starlette,
        listening: socket,
        limits: ConnectionLimits,
        *,
        drain_seconds: float,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        """Take nothing yet.

        Args:
            app: of ``application``.
            listening: takes connections already.
            drain_seconds: that answers may take once a signal came.
            name: of the model, with which the server says where it listens.
            say: shows a line to whoever started the server.
        """
        config = uvicorn.Config(
            app,
            http=protocol(limits),
            ws="none",
            loop="asyncio",
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        super().__init__(config)
        self.is_forced = False
        self._listening = listening
        self._drain_seconds = drain_seconds
        self._name = name
        self._say = say
        self._endpoints = app.state.endpoints

    def serve_until_ended(self) -> None:
        """Serve until a signal came and answers have ended."""
        self.run([self._listening])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start the application."""
        await super().startup(sockets)
        if self.started:
            # What is there now stays. Looking at it with each request's objects stops all threads.
            gc.collect()
            gc.freeze()
            host, port = self._listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._say(f"{self._name} at http://{shown}:{port}, Ctrl-C ends it")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or end at once where that has begun."""
        if self.should_exit:
            self.is_forced = True
            return
        if sig == signal.SIGINT:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)  # whoever sent it is to see that it ended the process
        count = self._endpoints.num_unfinished
        if count:
            answers = "1 answer" if count == 1 else f"{count} answers"
            seconds = f"{self._drain_seconds:g} s"
            self._say(f"draining {answers} for up to {seconds}, press Ctrl-C again to stop")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Take no new connection, let answers end, and end those that are left with an error."""
        for server in self.servers:
            server.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        until = time.monotonic() + self._drain_seconds
        while self.server_state.tasks and not self.is_forced and time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
        self._endpoints.end_answers()
        await super().shutdown(sockets)
