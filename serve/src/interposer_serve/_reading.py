"""Bodies of requests, up to a size."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from interposer_serve._errors import ApiError


async def read_object(request: Request, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object that a request carries.

    Raises: ApiError: it is no JSON object, or larger than ``most_bytes``.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another origin may send other types without being asked first.
        raise ApiError(415, f"content-type is {kind!r:.100}; allowed is 'application/json'")
    parts: list[bytes] = []
    length = request.headers.get("content-length", "")
    num_bytes = int(length) if length.isdecimal() else 0
    if num_bytes <= most_bytes:
        num_bytes = 0
        try:
            async for part in request.stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > most_bytes:
                    break
        except ClientDisconnect:
            raise ApiError(400, "The client left before its body was whole") from None
    if num_bytes > most_bytes:
        raise ApiError(
            413,
            f"The body has more than the {most_bytes} bytes that are allowed",
            code="body_too_large",
            headers={"connection": "close"},
        )
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body is a {type(body).__name__}; allowed is an object")
    return body
