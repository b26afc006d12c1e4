"""HTTP connections with limits on number, header size and idle time.

uvicorn's own protocol has no timeout for the first byte, for the end of a header, or for a client
that does not read the response.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from interposer_serve._errors import ApiError, ascii_json
from interposer_serve._limits import ConnectionLimits
from interposer_serve._proxies import TrustedProxies

_UNKNOWN = "unknown"
# Bytes of a refused body to read and discard. Some clients read the response only after that.
_MAX_DISCARDED_BYTES = 64 * 2**20


def protocol(
    limits: ConnectionLimits,
    proxies: TrustedProxies | None = None,
    tls: ssl.SSLContext | None = None,
) -> type[Any]:
    """Return an asyncio protocol class for uvicorn whose connections share the given limits.

    Args:
        limits: Limits on connections.
        proxies: Proxies whose connections are not limited by address.
        tls: Context of a server that speaks HTTPS; None for HTTP.
    """
    # uvicorn creates the connections from a class, so shared state must be in class attributes.
    counts = _Counts(limits, proxies or TrustedProxies(()))
    connection = type("Connection", (_Connection,), {"limits": limits, "counts": counts})
    if tls is None:
        return connection
    return type("TlsConnection", (_TlsConnection,), {"connection": connection, "context": tls})


class _Counts:
    """Numbers of open connections of a server, in total and by client address."""

    def __init__(self, limits: ConnectionLimits, proxies: TrustedProxies) -> None:
        self._limits = limits
        self._proxies = proxies
        self._by_address: Counter[str] = Counter()

    def refusal(self, address: str) -> str:
        """Return why an address may not open another connection; "" if it may."""
        limits = self._limits
        if self._by_address.total() >= limits.connections:
            return (
                f"The server has reached its limit of {limits.connections} connections. "
                "Try: again later"
            )
        allowed = limits.connections_per_address
        if self._by_address[address] >= allowed and address not in self._proxies:
            return (
                f"The address {address} has reached its limit of {allowed} connections. "
                "Try: close some, or use them for several requests"
            )
        return ""

    def add(self, address: str) -> None:
        """Count a new connection of an address."""
        self._by_address[address] += 1

    def remove(self, address: str) -> None:
        """Count a connection of an address as closed."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _TlsConnection(SSLProtocol):
    """A TLS connection that carries an HTTP connection, and is counted before its handshake.

    The option ``ssl`` of asyncio's servers has neither a limit on handshakes nor a time limit that
    uvicorn could set.

    Attributes:
        connection: Class of the HTTP connections.
        context: Context with the server's certificate.
    """

    connection: type[_Connection]
    context: ssl.SSLContext

    def __init__(self, **arguments: Any) -> None:
        connection = self.connection(**arguments)
        connection.counts_itself = False
        seconds = self.connection.limits.header_seconds
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            self.context,
            None,  # type: ignore[arg-type]  # no future waits for the handshake
            server_side=True,
            ssl_handshake_timeout=seconds,  # type: ignore[arg-type]  # a float works too
            ssl_shutdown_timeout=seconds,
        )
        self._address: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        client = get_remote_addr(transport)
        address = client[0] if client else _UNKNOWN
        counts = self.connection.counts
        if counts.refusal(address):
            transport.abort()  # an error could be sent only after the handshake
            return
        counts.add(address)
        self._address = address
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self.connection.counts.remove(self._address)
            self._address = None
        super().connection_lost(exc)


class _Connection(HttpToolsProtocol):
    """An HTTP connection that enforces the server's limits.

    Attributes:
        limits: Limits of the server.
        counts: Numbers of open connections of the server.
        counts_itself: Whether this connection is in ``counts``; False if a TLS connection is.
    """

    limits: ConnectionLimits
    counts: _Counts
    counts_itself = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeout_keep_alive: float = self.limits.idle_seconds  # type: ignore[assignment]
        self._address = _UNKNOWN
        self._is_counted = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_in_body = False
        self._is_closing = False
        self._discards_body = False
        self._discarded_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else _UNKNOWN
        reason = self.counts.refusal(self._address) if self.counts_itself else ""
        if not reason:
            if self.counts_itself:
                self.counts.add(self._address)
                self._is_counted = True
            self._set_timer(self.limits.header_seconds, self._on_timeout)
            return
        self._is_closing = True
        self._write_error(ApiError(503, reason, code="too_many_connections"))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self.counts.remove(self._address)
        self._cancel_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._discards_body:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
                return
        if self._is_closing or self.transport.is_closing():
            return
        max_bytes = self.limits.header_bytes
        while data and not self._is_in_body:
            # The parser buffers an incomplete header, so never feed it more than the limit at once.
            chunk, data = data[:max_bytes], data[max_bytes:]
            if not self._header_bytes:
                self._set_timer(self.limits.header_seconds, self._on_timeout)
            self._header_bytes += len(chunk)
            super().data_received(chunk)
            if self._is_closing or self.transport.is_closing():
                return
            if self._header_bytes > max_bytes:
                self._refuse(431, f"The header has more than {max_bytes} bytes")
                return
        if data:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._header_bytes = 0
        self._cancel_timer()
        super().on_headers_complete()
        # uvicorn closes the transport after the response, also if the body has not arrived yet.
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()
        if self._discards_body:
            self._discards_body = False
            self._discarded_bytes = 0
            self._set_timer(self.limits.idle_seconds, self._on_timeout)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and not self._is_closing:
            # Discard the remaining body, so that the connection can carry another request.
            self._discards_body = True
            self._set_timer(self.limits.header_seconds, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def close(self) -> None:
        """Close the connection once the response was sent.

        The remaining body is read first. Closing with unread data would reset the connection, and a
        client that sends its whole body before it reads would lose the response.
        """
        if self._is_in_body:
            self._close_after_reading()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        if self._is_in_body and self.cycle is not None and not self.cycle.response_started:
            message = "The server stops before it has received the whole body"
            self._write_error(ApiError(503, message, code="ending"))
            self.transport.close()
            return
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        # The client does not read: abort unless the buffer drains in time.
        if self._write_timer is None:
            seconds = self.limits.idle_seconds
            self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        """Start the timer within which the client must send data, in place of the previous one."""
        self._cancel_timer()
        self._read_timer = self.loop.call_later(seconds, callback)

    def _cancel_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_timeout(self) -> None:
        if self._header_bytes:
            seconds = self.limits.header_seconds
            self._refuse(408, f"The header was incomplete after {seconds:g} s")
        else:
            self.transport.close()  # no request has started, so there is nothing to respond to

    def _refuse(self, status: int, reason: str) -> None:
        self._write_error(ApiError(status, reason))
        self._close_after_reading()

    def _write_error(self, error: ApiError) -> None:
        """Write an error response directly to the connection, without the application."""
        content = ascii_json(error.body)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)

    def _close_after_reading(self) -> None:
        """Stop writing, discard further input, and close after ``header_seconds``."""
        self._is_closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(self.limits.header_seconds, self.transport.close)


class _ResponseTransport:
    """Transport for a response, whose ``close`` first reads the rest of the request's body."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Close the connection after the response was sent and the request was read."""
        self._connection.close()
