"""Errors as clients of OpenAI's interface read them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from interposer.errors import InterposerError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal of a request, or a failure of it.

    Attributes:
        status: of HTTP.
        param: the field that is at fault.
        code: a word for programs.
        headers: of the response, besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The object that clients get."""
        error = {
            "message": str(self),
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def content(self) -> bytes:
        """The same as JSON; a value that is told may hold half of a surrogate pair, escaped."""
        return json.dumps(self.body, separators=(",", ":")).encode()

    def event(self) -> bytes:
        """Return the error as the last event of a stream, whose status was sent already."""
        return b"data: " + self.content + b"\n\n"


class Gone(Exception):
    """The client left."""


def api_error(error: Exception) -> ApiError:
    """Return ``error`` as clients get it: what the SDK refuses is wrong usage."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InterposerError) and isinstance(error, ArithmeticError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, InterposerError):
        return ApiError(400, str(error))
    return ApiError(500, "The server failed at this request; its log says why", code="failed")


def shown(value: Any) -> str:
    """Return the beginning of a value as Python writes it, however long the value is."""
    return f"{value[:200] if isinstance(value, list | str) else value!r:.200}"


def check_model(asked: str, names: Collection[str]) -> None:
    """Raise ApiError where nothing that is served has the name that a client asks for."""
    if asked not in names:
        message = f"model is {asked!r:.100}; allowed is {' or '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def respond(request: Request, error: Exception) -> Response:
    """Return the response that tells an error, without the folder of the model."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    refusal = api_error(error)
    app = request.scope.get("app")
    for folder, name in app.state.hidden.items() if app is not None else ():
        refusal.args = (str(refusal).replace(folder, name),)
    return Response(refusal.content, refusal.status, refusal.headers, media_type="application/json")
