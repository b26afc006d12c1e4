"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from interposer.errors import ContextLengthError, InterposerError, near_names

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_CONTEXT_CODE = "context_length_exceeded"
# litellm recognizes a prompt that is too long by this text, and other clients by the code.
_CONTEXT_TEXT = "This model's maximum context length is exceeded"


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Format of the error responses of an API.

    Attributes:
        name: Name of the schema in the OpenAPI document.
        schema: JSON schema of the bodies.
        write: Returns the body of an error.
    """

    name: str
    schema: dict[str, Any]
    write: Callable[[ApiError], dict[str, Any]]


ERROR_FORMATS: dict[str, ErrorFormat] = {}
"""Formats of errors of other APIs than OpenAI's, by the start of the path."""


def error_format(path: str) -> ErrorFormat:
    """Return the format of the error responses of a path."""
    formats = (form for start, form in ERROR_FORMATS.items() if path.startswith(start))
    return next(formats, _OPENAI)


class ApiError(Exception):
    """An error that the client receives as a response, with HTTP status and error code.

    Attributes:
        status: HTTP status.
        param: Name of the wrong field; None if the error concerns no single field.
        code: Machine-readable name of the error.
        headers: Additional headers of the response.
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
        """Body of the error response, as a dict."""
        prefix = f"{_CONTEXT_TEXT}: " if self.code == _CONTEXT_CODE else ""
        error = {
            "message": prefix + str(self),
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def event(self) -> bytes:
        """Return the error as the last event of a stream whose status has already been sent."""
        return b"data: " + ascii_json(self.body) + b"\n\n"


def ascii_json(body: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a body as ASCII JSON, with lone surrogates escaped.

    Args:
        default: Converts objects that are not JSON.
    """
    return json.dumps(body, separators=(",", ":"), default=default).encode()


_OPENAI = ErrorFormat(
    "Error",
    {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    lambda error: error.body,
)


class Gone(Exception):
    """The client has disconnected, so no response can be sent."""


def api_error(error: Exception) -> ApiError:
    """Convert an exception to an ``ApiError``; errors of the SDK become status 400."""
    if isinstance(error, ApiError):
        return error
    # The model computed NaN or infinity, which no change of the request would prevent.
    if isinstance(error, InterposerError) and isinstance(error, ArithmeticError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, InterposerError):
        is_too_long = isinstance(error, ContextLengthError)
        return ApiError(400, str(error), code=_CONTEXT_CODE if is_too_long else None)
    return ApiError(
        500, "The server failed to process this request; its log has the reason", code="failed"
    )


def shown(value: Any) -> str:
    """Return the repr of a value, truncated to 200 characters."""
    # The repr of a large value takes long.
    if isinstance(value, dict):
        value = dict(islice(value.items(), 200))
    elif isinstance(value, list | str | bytes):
        value = value[:200]
    return f"{value!r:.200}"


def check_model(name: str, names: Collection[str]) -> None:
    """Raise ApiError unless the requested model is one of the served names.

    Raises: ApiError: no served model or adapter has the name.
    """
    if name not in names:
        message = f"model is {name!r:.100}; allowed is {near_names(name, names)}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def respond(request: Request, error: Exception) -> Response:
    """Convert an exception to an error response, in which the model's name replaces its path."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    refusal = api_error(error)
    app = request.scope.get("app")
    for folder, name in app.state.models.folders.items() if app is not None else ():
        # The text of an exception is in ``args``.
        refusal.args = (str(refusal).replace(folder, name),)
    content = ascii_json(error_format(request.url.path).write(refusal))
    return Response(content, refusal.status, refusal.headers, media_type="application/json")
