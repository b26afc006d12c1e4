"""Middleware that checks the API key and host of each request, and counts and logs responses.

Each request has an id: the client's header ``x-request-id``, or a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interposer.errors import ConfigError
from interposer.tooling import steady_time_ns
from interposer_serve._errors import ApiError, respond
from interposer_serve._format import new_id
from interposer_serve._management import PATHS as MANAGEMENT_PATHS
from interposer_serve._telemetry import Metrics, log_request

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# An id that cannot break a line of the log.
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# These paths reveal nothing about requests or the model, and need no key.
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/page.css", "/page.js"})


class Guard:
    """Middleware that refuses requests with a wrong API key or host name, and logs all requests.

    Args:
        app: Application that gets the other requests.
        metrics: Counts the responses.
        keys: Valid API keys. If there are none, requests need no key.
        management_keys: Valid keys of the endpoints that change the server.
        hosts: Allowed names in the Host header; None allows all. The check prevents DNS rebinding:
            a web page can point its own domain name to this server and read the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Iterable[str],
        management_keys: Iterable[str],
        hosts: frozenset[str] | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = _digests(keys)
        self._management_keys = _digests(management_keys)
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or respond with the reason for a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = new_id("req_")
        scope.setdefault("state", {}).update(
            id=request_id,
            received=steady_time_ns(),
            client="",
            num_prompt_tokens=0,
            num_new_tokens=0,
        )
        status = 500  # of the response to an error that the application does not handle

        async def count_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.responses.labels(name, status).inc()
                # OpenAI's clients read the first name, Anthropic's the second.
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = headers["request-id"] = request_id
            await send(message)

        refusal = self._refusal(scope)
        try:
            if refusal is None:
                await self._app(scope, receive, count_and_send)
            else:
                response = await respond(Request(scope), refusal)
                await response(scope, receive, count_and_send)
        finally:
            log_request(scope, status)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            return ApiError(403, f"host is {name!r:.100}; allowed are {allowed}", code="wrong_host")
        keys = self._management_keys if path in MANAGEMENT_PATHS else self._keys
        if not keys or path in _OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # Anthropic's clients send the key here
        # Starlette decodes headers as Latin-1: encode again to get the bytes that the client sent.
        digest = _digest(key.strip().encode("latin-1"))
        # Compare with every key, so that the time does not reveal which key is similar.
        matches = [key for valid, key in keys.items() if hmac.compare_digest(digest, valid)]
        if matches:
            # Each client has its own key, so the key identifies the client in the prefix cache.
            scope["state"]["client"] = _digest(matches[0].encode()).hex()
            return None
        return ApiError(
            401,
            "The API key is missing or unknown. Try: the header 'authorization: Bearer KEY' or "
            "'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def check_keys(keys: object) -> frozenset[str]:
    """Return the API keys as a set, after checking that HTTP clients can send them.

    Raises: ConfigError: ``keys`` is not a collection of texts, or a key is empty, has leading or
        trailing spaces or a control character.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Collection):
        raise ConfigError(f"keys is a {type(keys).__name__}, must be a list. Try: ['a-long-key']")
    for key in keys:
        if not isinstance(key, str):
            raise ConfigError(f"An API key is a {type(key).__name__}, must be a text")
        if not key.strip():
            raise ConfigError("An API key is empty. Try: leave it out")
        if key != key.strip() or not key.isprintable():
            raise ConfigError(
                f"The API key {key[:2]!r}... has spaces at an end or contains a control character, "
                "which an HTTP header cannot carry. Try: the output of "
                "python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
    return frozenset(keys)


def _digests(keys: Iterable[str]) -> dict[bytes, str]:
    """Return the keys by the digests of what clients send."""
    # HTTP libraries encode a key that is not ASCII either as UTF-8 or as Latin-1.
    return {_digest(encoded): key for key in keys for encoded in _encodings(key)}


def _encodings(key: str) -> Iterator[bytes]:
    yield key.encode()
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
