"""Requests and connections that would harm a server without limits, by name.

The tests send each one and check that it is refused. ``load.py`` sends each one while other clients
use the server, and measures how much they are slowed down.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from serve.tests.conftest import NAME

__all__ = ["BODIES", "CONNECTIONS", "CONSTRAINTS", "body_of", "nested"]

NUM_ITEMS = 200_000
NUM_BRACES = 300
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def repeated(item: str) -> str:
    """Return a JSON list that repeats an item."""
    return f"[{','.join([item] * NUM_ITEMS)}]"


def nested(depth: int) -> str:
    """Return nested JSON lists."""
    return "[" * depth + "]" * depth


def chained(count: int) -> dict[str, Any]:
    """Return a JSON schema of ``count`` definitions, each of which refers to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def response_format(schema: Any) -> dict[str, Any]:
    json_schema = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def structured_outputs(kind: str, value: Any) -> dict[str, Any]:
    return {"structured_outputs": {kind: value}}


def chained_rules(count: int) -> str:
    """Return a grammar of ``count`` rules, each of which refers to the next."""
    links = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f'start: r0\n{links}\nr{count}: "a"\n'


# Fields of a completion that has a costly constraint, and a part of the error message.
CONSTRAINTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "chained rules": (
        structured_outputs("grammar", chained_rules(5000)),
        "rules; allowed are 2000",
    ),
    "chained references": (response_format(chained(3000)), "3001 $ref; allowed are 2000"),
    "many choices": (
        structured_outputs("choice", [f"v{i}" for i in range(70_000)]),
        "bytes; allowed are 524288",
    ),
    "deep brackets": (
        structured_outputs("regex", "(" * NUM_BRACES + "a" + ")" * NUM_BRACES),
        "levels of brackets",
    ),
    "repeated repeats": (
        structured_outputs("regex", "(a{1000}){1000}"),
        "cannot be compiled: ",
    ),
    "a large multiple": (
        response_format({"type": "integer", "multipleOf": 9999991}),
        "compiling takes",
    ),
}

LONG_TEXT = "x " * NUM_ITEMS
UNKNOWN_FIELDS = ",".join(f'"{index}": 1' for index in range(NUM_ITEMS))
MESSAGES = ",".join(['{"role": "user", "content": "a"}'] * 8000)
# Path, body without the field "model", and a part of the error message.
BODIES: Mapping[str, tuple[str, str, str]] = {
    "wrong tokens": ("/v1/completions", f'{{"prompt": {repeated("-1")}}}', "tokens; allowed are"),
    "wrong texts": ("/v1/completions", f'{{"prompt": {repeated("null")}}}', "in one request"),
    "many lists": ("/v1/completions", f'{{"prompt": {repeated("[1]")}}}', "objects and lists"),
    "many stop texts": (
        "/v1/completions",
        f'{{"prompt": "x", "stop": {repeated("1")}}}',
        "stop is",
    ),
    "many wrong options": (
        "/v1/responses",
        f'{{"input": "x", "include": {repeated("1")}}}',
        "include is",
    ),
    "many unknown options": (
        "/v1/chat/completions",
        f'{{"messages": [{{"role": "user"}}], "stream_options": {{{UNKNOWN_FIELDS}}}}}',
        "stream_options is",
    ),
    "a long name": ("/v1/completions", f'{{"prompt": "x", "{LONG_TEXT}": 1}}', "Unknown field"),
    "a long prompt": ("/v1/completions", f'{{"prompt": "{LONG_TEXT}"}}', "characters; the allowed"),
    "a deep body": ("/v1/completions", f'{{"prompt": {nested(500)}}}', "levels deep"),
    "a deeper body": ("/v1/completions", f'{{"prompt": {nested(5000)}}}', "not valid JSON"),
    "half a surrogate pair as a name": (
        "/v1/completions",
        '{"prompt": "x", "\\ud800": 1}',
        "surrogate",
    ),
    "half a surrogate pair": ("/v1/completions", '{"prompt": "\\udc00"}', "surrogate"),
    "half a surrogate pair in a message": (
        "/v1/chat/completions",
        '{"messages": [{"content": "\\ud800"}]}',
        "surrogate",
    ),
    "wrong messages": ("/v1/chat/completions", f'{{"messages": {repeated("1")}}}', "messages is"),
    "many messages": (
        "/v1/chat/completions",
        f'{{"messages": [{MESSAGES}]}}',
        "the model's context is",
    ),
    "many tokens to detokenize": (
        "/detokenize",
        f'{{"tokens": {repeated("1")}}}',
        "tokens; allowed are",
    ),
    "a long text to tokenize": (
        "/tokenize",
        f'{{"prompt": "{LONG_TEXT}"}}',
        "characters; the allowed",
    ),
}


def body_of(content: str) -> bytes:
    """Return the bytes of a body of ``BODIES``, with the field ``model`` added."""
    return content.replace("{", f'{{"model": {json.dumps(NAME)}, ', 1).encode()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def _open_idle(port: int, count: int, data: bytes) -> None:
    """Open connections that never send a whole request, and wait until the server closes all."""
    connections = []
    for _ in range(count):
        connection = _connect(port)
        with suppress(OSError):
            connection.sendall(data)
        connections.append(connection)
    for connection in connections:
        with suppress(OSError):
            while connection.recv(65536):
                pass
        connection.close()


def _endless_header(port: int) -> None:
    with _connect(port) as connection, suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(100):
            connection.sendall(b"a" * 2**20)


def _endless_body(port: int) -> None:
    with _connect(port) as connection, suppress(OSError):
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"%x\r\n" % 2**20 + b"a" * 2**20 + b"\r\n")


CONNECTIONS: Mapping[str, Callable[[int], None]] = {
    "silent connections": lambda port: _open_idle(port, 200, b""),
    "incomplete headers": lambda port: _open_idle(port, 200, b"GET /health HTTP/1.1\r\nx: "),
    "an endless header": _endless_header,
    "an endless body": _endless_body,
}
