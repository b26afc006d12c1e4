"""The gate of every request: it checks who may ask, and counts answers."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interposer_serve._errors import ApiError, respond
from interposer_serve._metrics import Metrics

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# Nothing of these tells anything about requests or the model.
_OPEN = frozenset({"/", "/health", "/ready", "/page.css", "/page.js"})


class Guard:
    """Lets requests in that name one of the keys; without keys, those that this machine made.

    Args:
        keys: any of them is enough; none asks for none.
        hosts: names by which clients may call the server; None allows all. A page of another
            origin can have its own name lead here, and would then read answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Iterable[str],
        hosts: frozenset[str] | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._digests = [_digest(key) for key in keys]
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["received"] = time.time_ns()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.responses.labels(name, message["status"]).inc()
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            response = await respond(Request(scope), refusal)
            await response(scope, receive, counted)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            return ApiError(403, f"host is {name!r:.100}; allowed are {known}", code="wrong_host")
        if not self._digests or path in _OPEN:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if any(matches):
            return None
        return ApiError(
            401,
            "The API key is missing or unknown. Try: the header 'authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
