"""The gate of every request: it checks who may ask, and counts answers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interposer.errors import ConfigError
from interposer.tooling import steady_time_ns
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
        # Programs write a key that is no ASCII in one of two ways.
        spelled = {spelling for key in keys for spelling in _spellings(key)}
        self._keys = {_digest(spelling): key for spelling, key in spelled}
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {}).update(received=steady_time_ns(), client="")

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.responses.labels(name, message["status"]).inc()
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            response = await respond(Request(scope), refusal)
            await response(scope, receive, counted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            return ApiError(403, f"host is {name!r:.100}; allowed are {known}", code="wrong_host")
        if not self._keys or path in _OPEN:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # As it came: headers are read as Latin-1, whatever they are.
        given = _digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        # All are compared, so that the time tells nothing.
        found = [key for known, key in self._keys.items() if hmac.compare_digest(given, known)]
        if found:
            # The key is nobody's but its own client's, so that it keeps clients apart.
            scope["state"]["client"] = _digest(found[0].encode()).hex()
            return None
        return ApiError(
            401,
            "The API key is missing or unknown. Try: the header 'authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def check_keys(keys: object) -> frozenset[str]:
    """Return keys that clients can send.

    Raises: ConfigError: they are no collection of texts, or one is empty or holds what no header
        can carry.
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
                f"An API key is {key[:2]!r}..., with a space around it or a control character in "
                "it, which no header carries. Try: the output of "
                "python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
    return frozenset(keys)


def _spellings(key: str) -> Iterator[tuple[bytes, str]]:
    yield key.encode(), key
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1"), key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
