"""The server closes idle connections, slow requests, and connections above a limit."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing, suppress

import pytest
from serve.tests.conftest import NAME, Served, serving
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_engine import LanguageModel
from interposer_serve import ConnectionLimits, Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

SOON = 0.1
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_SECONDS)


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    content = b""
    while chunk := connection.recv(65536):
        content += chunk
    return content


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("data", "status"),
    [(b"", b""), (b"G", b"408"), (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n", b"408")],
)
def test_a_slow_header_is_refused(lm: LanguageModel, data: bytes, status: bytes) -> None:
    with (
        serving(lm, connections=ConnectionLimits(header_seconds=SOON)) as served,
        closing(connect(served)) as connection,
    ):
        connection.sendall(data)
        assert read_to_end(connection)[9:12] == status


def test_an_idle_connection_is_closed(lm: LanguageModel) -> None:
    with (
        serving(lm, connections=ConnectionLimits(idle_seconds=SOON)) as served,
        closing(connect(served)) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert read_to_end(connection).endswith(b'{"status":"ok"}')


def test_a_large_header_is_refused(served: Served) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(64):
            connection.sendall(b"a" * 1024)
        connection.shutdown(socket.SHUT_WR)
        assert b" 431 " in read_to_end(connection)
    assert served.ask("/health").status == 200


def test_data_that_is_not_http_is_refused(served: Served) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")


def test_a_slow_body_is_refused(lm: LanguageModel) -> None:
    with (
        serving(lm, limits=Limits(body_seconds=SOON)) as served,
        closing(connect(served)) as connection,
    ):
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert b" 408 " in read_to_end(connection)


def test_an_incomplete_body_does_not_delay_shutdown(lm: LanguageModel) -> None:
    with closing(socket.socket()) as connection:
        with serving(lm, drain=round(WAIT_SECONDS)) as served:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
            # Once a later request is answered, the server has read the incomplete body.
            assert served.ask("/health").status == 200
        assert b" 503 " in read_to_end(connection)


def test_connections_of_one_address_are_limited(lm: LanguageModel) -> None:
    limits = ConnectionLimits(connections_per_address=3)
    with serving(lm, connections=limits) as served, ExitStack() as stack:
        connections = [stack.enter_context(closing(connect(served))) for _ in range(3)]
        with closing(connect(served)) as another:
            assert b" 503 " in read_to_end(another)
        connections[0].close()
        wait_until(lambda: served.ask("/health").status == 200)


def test_a_connection_is_reusable_after_a_request_was_refused_before_its_body(
    lm: LanguageModel,
) -> None:
    with serving(lm, keys=["secret"]) as served, closing(connect(served)) as connection:
        connection.sendall(HEAD + b"content-length: 5\r\n\r\n")
        content = b""
        while b"invalid_api_key" not in content:
            content += connection.recv(65536)
        connection.sendall(
            b"12345GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        )
        assert read_to_end(connection).endswith(b'{"status":"ok"}')


def test_a_client_that_does_not_read_is_disconnected(lm: LanguageModel) -> None:
    limits = ConnectionLimits(idle_seconds=SOON)
    body = {"model": NAME, "prompt": "x", "max_tokens": 90, "ignore_eos": True, "n": 8}
    with serving(lm, connections=limits, send_bytes=4096) as served:
        content = json.dumps({**body, "stream": True, "logprobs": 20}).encode()
        with closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(WAIT_SECONDS)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(HEAD + f"content-length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: "interposer_generations_total{" in served.ask("/metrics").body)
            content = b""
            with suppress(ConnectionResetError):
                content = read_to_end(connection)
            assert b"[DONE]" not in content
