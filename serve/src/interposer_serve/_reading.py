"""Bodies of requests, up to a size."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from itertools import chain
from typing import Any

from starlette.requests import ClientDisconnect, Request

from interposer_serve._errors import ApiError
from interposer_serve._limits import Limits

_MOST_CONTAINERS = 50_000
_MOST_LEVELS = 128
_LARGE = 100_000  # characters
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Bodies:
    """Reads the bodies of requests, as many at once as fit into the memory for them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = min(limits.body_seconds, limits.deadline_seconds)
        self._num_bytes = 0

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Return the JSON object that a request carries.

        Raises: ApiError: it is no JSON object, is too large, comes too slowly, or there is no
            memory for it now.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page of another origin may send other types without being asked first.
            raise ApiError(415, f"content-type is {kind!r:.100}; allowed is 'application/json'")
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    num_bytes += len(part)
                    self._num_bytes += len(part)
                    self._check(request, num_bytes)
                    parts.append(part)
        except ClientDisconnect:
            raise ApiError(400, "The client left before its body was whole") from None
        except TimeoutError:
            raise ApiError(
                408,
                f"The body was not whole after {self._seconds:g} s",
                code="body_too_slow",
                headers={"connection": "close"},
            ) from None
        finally:
            self._num_bytes -= num_bytes
        return parsed(b"".join(parts))

    def _check(self, request: Request, num_bytes: int) -> None:
        most = self._limits.body_bytes
        length = request.headers.get("content-length", "")
        # A length of more digits than that is refused by its size alone.
        announced = int(length[:19]) if length.isdecimal() else 0
        if max(num_bytes, announced) > most:
            raise ApiError(
                413,
                f"The body has more than the {most} bytes that are allowed",
                code="body_too_large",
            )
        if self._num_bytes > self._limits.all_bodies_bytes:
            raise ApiError(
                503,
                "The bodies of other requests take the memory for them. Try: again later",
                code="bodies_full",
                headers={"retry-after": "1"},
            )


def parsed(content: bytes) -> dict[str, Any]:
    """Return the object that JSON holds.

    Raises: ApiError: it holds none, or a text that is no Unicode.
    """
    try:
        body = _loaded(content.decode())
        if _SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        message = f"The body holds the half {half!r} of a surrogate pair, which is no character"
        raise ApiError(400, message) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body is a {type(body).__name__}; allowed is an object")
    _check_shape(body)
    return body


def _loaded(text: str) -> Any:
    """Return what JSON holds.

    A million small lists are looked at by the collector of garbage several times while they are
    made, which takes longer than making them.
    """
    if len(text) < _LARGE or not gc.isenabled():
        return json.loads(text)
    gc.disable()
    try:
        return json.loads(text)
    finally:
        gc.enable()


def _check_shape(body: dict[str, Any]) -> None:
    """Refuse what would cost more to look at than to read.

    Raises: ApiError: objects and lists nest too deeply, or there are too many.
    """
    level: list[Any] = [body]
    num_containers, depth = 1, 1
    while level:
        values = [*chain.from_iterable(v.values() if type(v) is dict else v for v in level)]
        # A million numbers are looked at one by one only where something else is among them.
        has_more = not {dict, list}.isdisjoint(set(map(type, values)))
        level = [value for value in values if type(value) in (dict, list)] if has_more else []
        num_containers += len(level)
        depth += bool(level)
        if num_containers > _MOST_CONTAINERS:
            message = f"The body has more than {_MOST_CONTAINERS} objects and lists"
            raise ApiError(400, message, code="body_too_complex")
        if depth > _MOST_LEVELS:
            message = f"Objects and lists of the body nest more than {_MOST_LEVELS} levels deep"
            raise ApiError(400, message, code="body_too_complex")
