"""The server of ``interposer serve``: prints its address, and finishes answers at shutdown."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from socket import socket
from ssl import SSLContext
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG

from interposer_serve._connections import protocol
from interposer_serve._limits import ConnectionLimits
from interposer_serve._proxies import ClientLimit, TrustedProxies

_CLOSE_SECONDS = 2  # time to send errors to clients whose answers were cut off
_POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """Runs the application until a signal arrives, and then finishes the running answers.

    After the first Ctrl-C or SIGTERM, running answers have ``drain_seconds`` to finish. Answers
    that do not finish in time, or before a second signal, end with an error.

    Attributes:
        is_forced: Whether a second signal arrived.
    """

    def __init__(
        self,
        app: Starlette,
        listening: socket,
        limits: ConnectionLimits,
        *,
        tls: SSLContext | None = None,
        proxies: TrustedProxies | None = None,
        drain_seconds: float,
        log_level: str,
        name: str,
        print_line: Callable[[str], None],
    ) -> None:
        """Configure the server, without accepting connections yet.

        Args:
            app: Application that ``application`` returned.
            listening: Socket that is bound and listening.
            limits: Limits on connections.
            tls: Context with the certificate, for HTTPS; None for HTTP.
            proxies: Proxies from which the header X-Forwarded-For is read; None for no proxies.
            drain_seconds: Time for running answers after the first signal, in seconds.
            log_level: Name of the least severe level to log, in capitals.
            name: Name of the model, for messages.
            print_line: Prints a line for the user who started the server.
        """
        config = uvicorn.Config(
            app if proxies is None else ClientLimit(app, limits, proxies),
            http=protocol(limits, proxies, tls),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=_log_config(log_level),
            access_log=False,  # the application logs its requests with times and tokens
            server_header=False,
            # By default uvicorn reads these headers from each local process.
            proxy_headers=proxies is not None,
            forwarded_allow_ips=[] if proxies is None else [*proxies.addresses],
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        super().__init__(config)
        self.is_forced = False
        self._listening = listening
        self._drain_seconds = drain_seconds
        self._name = name
        self._scheme = "http" if tls is None else "https"
        self._print_line = print_line
        self._models = app.state.models

    def serve_until_stopped(self) -> None:
        """Serve requests until a signal arrives and all answers have ended."""
        self.run([self._listening])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start the application, and print the server's address."""
        await super().startup(sockets)
        if self.started:
            self._models.freeze_objects()
            host, port = self._listening.getsockname()[:2]
            url_host = f"[{host}]" if ":" in host else host
            self._print_line(f"{self._name} at {self._scheme}://{url_host}:{port}, Ctrl-C ends it")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish running answers after the first signal, and stop at once after the second."""
        if self.should_exit:
            self.is_forced = True
            return
        if sig == signal.SIGINT:
            self.should_exit = True
        else:
            # uvicorn raises the signal again at the end, so that the exit status shows SIGTERM.
            super().handle_exit(sig, frame)
        count = self._models.num_unfinished
        if count:
            answers = "1 answer" if count == 1 else f"{count} answers"
            seconds = f"{self._drain_seconds:g} s"
            self._print_line(f"draining {answers} for up to {seconds}, press Ctrl-C again to stop")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Refuse new connections, finish answers in time, and end all others with an error."""
        for server in self.servers:
            server.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        # uvicorn cancels running answers after ``_CLOSE_SECONDS``, so drain them first.
        deadline = time.monotonic() + self._drain_seconds
        while self.server_state.tasks and not self.is_forced and time.monotonic() < deadline:
            if self._models.is_stuck:
                break  # a rank is lost or the engine failed, so no answer can finish
            await asyncio.sleep(_POLL_SECONDS)
        self._models.end_answers()
        await super().shutdown(sockets)


def _log_config(level: str) -> dict[str, Any]:
    """Return uvicorn's logging configuration with timestamps, also for this project's loggers."""
    formatter = {**LOGGING_CONFIG["formatters"]["default"]}
    formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    # At INFO, uvicorn repeats the lines that ``Server`` prints.
    levels = {"interposer": level, "uvicorn": "WARNING" if level == "INFO" else level}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"default": formatter},
        "handlers": {"default": LOGGING_CONFIG["handlers"]["default"]},
        "loggers": {
            name: {"handlers": ["default"], "level": logger_level, "propagate": False}
            for name, logger_level in levels.items()
        },
    }
