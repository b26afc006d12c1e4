"""Connections that end: bounds on what one may cost before it is a request, and after it was one.

uvicorn's own protocol waits for a first byte, for the end of a header and for a client that reads
nothing as long as the connection stands.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from interposer_serve._errors import ApiError
from interposer_serve._limits import ConnectionLimits

_UNKNOWN = "unknown"
_THROWN_AWAY = 64 * 2**20  # bytes of a body that was refused, so that its client reads the answer


def protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """Return the protocol of a server whose connections have these bounds together."""
    counts: Counter[str] = Counter()
    return type("Connection", (_Connection,), {"limits": limits, "counts": counts})


class _Connection(HttpToolsProtocol):
    """One connection.

    Attributes:
        limits: of all connections of the server.
        counts: open connections by address.
    """

    limits: ConnectionLimits
    counts: Counter[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeout_keep_alive: float = self.limits.idle_seconds  # type: ignore[assignment]
        self._address = _UNKNOWN
        self._is_counted = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_body = False
        self._is_ending = False
        self._is_unwanted = False
        self._thrown_away = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else _UNKNOWN
        limits, counts = self.limits, self.counts
        if counts.total() >= limits.connections:
            reason = f"The server has its {limits.connections} connections. Try: again later"
        elif counts[self._address] >= limits.connections_per_address:
            allowed = limits.connections_per_address
            reason = f"The address {self._address} has its {allowed} connections. Try: fewer"
        else:
            counts[self._address] += 1
            self._is_counted = True
            self._wait(limits.header_seconds, self._late)
            return
        self._is_ending = True
        self._answer(ApiError(503, reason, code="too_many_connections"))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self.counts[self._address] -= 1
            if not self.counts[self._address]:
                del self.counts[self._address]
        self._wait(None, None)
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ending or self._is_unwanted:
            self._thrown_away += len(data)
            if self._thrown_away > _THROWN_AWAY:
                self.transport.abort()
                return
        if self._is_ending or self.transport.is_closing():
            return
        most = self.limits.header_bytes
        while data and not self._in_body:
            # No more at once than a header may have, as the parser keeps what is not whole.
            part, data = data[:most], data[most:]
            if not self._header_bytes:
                self._wait(self.limits.header_seconds, self._late)
            self._header_bytes += len(part)
            super().data_received(part)
            if self._is_ending or self.transport.is_closing():
                return
            if self._header_bytes > most:
                self._refuse(431, f"The header has more than {most} bytes")
                return
        if data:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._header_bytes = 0
        self._wait(None, None)
        super().on_headers_complete()
        self.cycle.transport = _Responses(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        if self._is_unwanted:
            self._is_unwanted = False
            self._wait(self.limits.idle_seconds, self._late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and not self._is_ending:
            # What is left of the body is thrown away, so that another request can follow.
            self._is_unwanted = True
            self._wait(self.limits.header_seconds, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def close(self) -> None:
        """End after what was written.

        A client that sends all of its body before it reads finds its connection reset in place of
        the answer, unless the body is read.
        """
        if self._in_body:
            self._linger()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        if self._in_body and self.cycle is not None and not self.cycle.response_started:
            error = ApiError(503, "The server ends, and the body is not whole", code="ending")
            self._answer(error)
            self.transport.close()
            return
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _wait(self, seconds: float | None, then: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, then)

    def _late(self) -> None:
        if self._header_bytes:
            seconds = self.limits.header_seconds
            self._refuse(408, f"The header was not whole after {seconds:g} s")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, reason: str) -> None:
        self._answer(ApiError(status, reason))
        self._linger()

    def _answer(self, error: ApiError) -> None:
        """Write a response that no application made."""
        content = error.content
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)

    def _linger(self) -> None:
        """End the connection when its client has taken what was sent, or after a while."""
        self._is_ending = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(self.limits.header_seconds, self.transport.close)


class _Responses:
    """What a response is written to: the transport of a connection, which ends with care."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """End the connection after what was written."""
        self._connection.close()
