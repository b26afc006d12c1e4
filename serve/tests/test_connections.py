"""Connections that ask for nothing, ask too slowly or take nothing end by themselves."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing, suppress

import pytest
from serve.tests.conftest import NAME, Served, serving
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_models import LanguageModel
from interposer_serve import ConnectionLimits, Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

SOON = 0.1
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_SECONDS)


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the server ends the connection."""
    content = b""
    while part := connection.recv(65536):
        content += part
    return content


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", b""), (b"G", b"408"), (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n", b"408")],
)
def test_a_header_has_to_come_in_time(lm: LanguageModel, sent: bytes, status: bytes) -> None:
    with (
        serving(lm, connections=ConnectionLimits(header_seconds=SOON)) as served,
        closing(connected(served)) as connection,
    ):
        connection.sendall(sent)
        assert rest(connection)[9:12] == status


def test_the_next_request_of_a_connection_has_to_come_in_time(lm: LanguageModel) -> None:
    with (
        serving(lm, connections=ConnectionLimits(idle_seconds=SOON)) as served,
        closing(connected(served)) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert rest(connection).endswith(b'{"status":"ok"}')


def test_a_header_has_a_size(served: Served) -> None:
    with closing(connected(served)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(64):
            connection.sendall(b"a" * 1024)
        connection.shutdown(socket.SHUT_WR)
        assert b" 431 " in rest(connection)
    assert served.ask("/health").status == 200


def test_what_is_no_http_is_told_so(served: Served) -> None:
    with closing(connected(served)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 400 ")


def test_a_body_has_to_come_in_time(lm: LanguageModel) -> None:
    with (
        serving(lm, limits=Limits(body_seconds=SOON)) as served,
        closing(connected(served)) as connection,
    ):
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert b" 408 " in rest(connection)


def test_half_a_body_does_not_hold_up_the_end(lm: LanguageModel) -> None:
    with closing(socket.socket()) as connection:
        with serving(lm, drain=round(WAIT_SECONDS)) as served:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
            # The server has it once it has answered who came later.
            assert served.ask("/health").status == 200
        assert b" 503 " in rest(connection)


def test_connections_of_one_address_have_a_number(lm: LanguageModel) -> None:
    limits = ConnectionLimits(connections_per_address=3)
    with serving(lm, connections=limits) as served, ExitStack() as stack:
        held = [stack.enter_context(closing(connected(served))) for _ in range(3)]
        with closing(connected(served)) as another:
            assert b" 503 " in rest(another)
        held[0].close()
        wait_until(lambda: served.ask("/health").status == 200)


def test_a_request_may_follow_one_that_was_refused_before_its_body(lm: LanguageModel) -> None:
    with serving(lm, keys=["secret"]) as served, closing(connected(served)) as connection:
        connection.sendall(HEAD + b"content-length: 5\r\n\r\n")
        content = b""
        while b"invalid_api_key" not in content:
            content += connection.recv(65536)
        connection.sendall(
            b"12345GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        )
        assert rest(connection).endswith(b'{"status":"ok"}')


def test_a_client_that_takes_nothing_is_left(lm: LanguageModel) -> None:
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
                content = rest(connection)
            assert b"[DONE]" not in content
