"""Requests and connections that would cost others, by name; each is bounded by itself.

Tests ask for one after the other. ``load.py`` asks while others are served.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from serve.tests.conftest import NAME

__all__ = ["BODIES", "CONNECTIONS", "FORMS", "body_of", "nested"]

NUM_ITEMS = 200_000
NUM_BRACES = 300
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def listed(item: str) -> str:
    return f"[{','.join([item] * NUM_ITEMS)}]"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def chained(count: int) -> dict[str, Any]:
    """Return a schema that leads from one definition to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def of_schema(schema: Any) -> dict[str, Any]:
    described = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def of_form(kind: str, value: Any) -> dict[str, Any]:
    return {"structured_outputs": {kind: value}}


def rules(count: int) -> str:
    links = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f'start: r0\n{links}\nr{count}: "a"\n'


# Fields of a completion, with a part of the reason for which it is refused.
FORMS: Mapping[str, tuple[dict[str, Any], str]] = {
    "chained rules": (of_form("grammar", rules(5000)), "rules; allowed are 2000"),
    "chained references": (of_schema(chained(3000)), "3001 $ref; allowed are 2000"),
    "many choices": (
        of_form("choice", [f"v{i}" for i in range(70_000)]),
        "bytes; allowed are 524288",
    ),
    "deep brackets": (
        of_form("regex", "(" * NUM_BRACES + "a" + ")" * NUM_BRACES),
        "levels of brackets",
    ),
    "repeated repeats": (of_form("regex", "(a{1000}){1000}"), "more memory than is allowed"),
    "a large multiple": (
        of_schema({"type": "integer", "multipleOf": 9999991}),
        "compiling it takes",
    ),
}

LONG = "x " * NUM_ITEMS
TURNS = ",".join(['{"role": "user", "content": "a"}'] * 8000)
# A path, a body without the model, and a part of the reason for which it is refused.
BODIES: Mapping[str, tuple[str, str, str]] = {
    "wrong tokens": ("/v1/completions", f'{{"prompt": {listed("-1")}}}', "tokens; allowed are"),
    "wrong texts": ("/v1/completions", f'{{"prompt": {listed("null")}}}', "in one request"),
    "lists": ("/v1/completions", f'{{"prompt": {listed("[1]")}}}', "objects and lists"),
    "stops": ("/v1/completions", f'{{"prompt": "x", "stop": {listed("1")}}}', "stop is"),
    "a long name": ("/v1/completions", f'{{"prompt": "x", "{LONG}": 1}}', "Unknown field"),
    "a long prompt": ("/v1/completions", f'{{"prompt": "{LONG}"}}', "characters, and"),
    "a deep body": ("/v1/completions", f'{{"prompt": {nested(500)}}}', "levels deep"),
    "a deeper body": ("/v1/completions", f'{{"prompt": {nested(5000)}}}', "no JSON"),
    "half a character as a name": (
        "/v1/completions",
        '{"prompt": "x", "\\ud800": 1}',
        "surrogate",
    ),
    "half a character": ("/v1/completions", '{"prompt": "\\udc00"}', "surrogate"),
    "half a character in a message": (
        "/v1/chat/completions",
        '{"messages": [{"content": "\\ud800"}]}',
        "surrogate",
    ),
    "messages": ("/v1/chat/completions", f'{{"messages": {listed("1")}}}', "messages is"),
    "turns": ("/v1/chat/completions", f'{{"messages": [{TURNS}]}}', "the model's context is"),
    "detokenized": ("/detokenize", f'{{"tokens": {listed("1")}}}', "tokens; allowed are"),
    "tokenized": ("/tokenize", f'{{"prompt": "{LONG}"}}', "characters, and"),
}


def body_of(content: str) -> bytes:
    """Return a body of ``BODIES`` with the model."""
    return content.replace("{", f'{{"model": {json.dumps(NAME)}, ', 1).encode()


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def _held(port: int, count: int, sent: bytes) -> None:
    """Open connections that never ask, and wait until the server ends the last one."""
    connections = []
    for _ in range(count):
        connection = _connected(port)
        with suppress(OSError):
            connection.sendall(sent)
        connections.append(connection)
    for connection in connections:
        with suppress(OSError):
            while connection.recv(65536):
                pass
        connection.close()


def _endless_header(port: int) -> None:
    with _connected(port) as connection, suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(100):
            connection.sendall(b"a" * 2**20)


def _endless_body(port: int) -> None:
    with _connected(port) as connection, suppress(OSError):
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"%x\r\n" % 2**20 + b"a" * 2**20 + b"\r\n")


CONNECTIONS: Mapping[str, Callable[[int], None]] = {
    "silent connections": lambda port: _held(port, 200, b""),
    "half headers": lambda port: _held(port, 200, b"GET /health HTTP/1.1\r\nx: "),
    "an endless header": _endless_header,
    "an endless body": _endless_body,
}
