"""Cross-origin requests (CORS): which web pages may use the server from a browser."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from interposer.errors import ConfigError

_ALL = "*"
_STAINLESS = "arch async helper-method lang os package-version retry-count runtime runtime-version"
# Headers that the endpoints read, and headers that the JavaScript clients of OpenAI and Anthropic
# always send.
_HEADERS = (
    "authorization",
    "content-type",
    "traceparent",
    "x-api-key",
    "x-request-id",
    "openai-organization",
    "openai-project",
    "anthropic-version",
    "anthropic-dangerous-direct-browser-access",
    *(f"x-stainless-{name}" for name in (*_STAINLESS.split(), "timeout")),
)


def check_origins(origins: Collection[str], *, has_keys: bool) -> tuple[str, ...]:
    """Return the origins, after checking that a browser can send each of them.

    Raises: ConfigError: ``origins`` is not a list, an origin is malformed, or all origins are
        allowed although requests need no key.
    """
    if isinstance(origins, str | bytes) or not isinstance(origins, Collection):
        raise ConfigError(
            f"origins is {origins!r:.100}, must be a list. Try: ['https://app.example.org']"
        )
    for origin in origins:
        if origin != _ALL and not _is_origin(origin):
            raise ConfigError(
                f"The origin {origin!r:.100} is not SCHEME://HOST[:PORT] in lower case, without a "
                "path. Try: 'https://app.example.org'"
            )
    if _ALL in origins and not has_keys:
        # Also on a loopback address: the browser of the server's own user opens web pages too.
        raise ConfigError(
            "The origin '*' would let each web page that a browser opens use the model without a "
            "key. Try: the exact origins, or API keys"
        )
    return tuple(origins)


def _is_origin(origin: object) -> bool:
    """Return whether a text is an origin as browsers send it in the header ``Origin``."""
    if not isinstance(origin, str) or not origin.isascii() or origin != origin.lower():
        return False
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    has_default_port = (parts.scheme, port) in {("http", 80), ("https", 443)}
    is_exact = origin == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return bool(parts.scheme and parts.hostname) and is_exact and not has_default_port


def cors_middleware(origins: Collection[str]) -> list[Middleware]:
    """Return the middleware that lets web pages of the origins use the server.

    It responds to preflight requests, which browsers send without a key. Credentials such as
    cookies stay forbidden, because the server uses none.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=_HEADERS,
            expose_headers=("retry-after", "x-request-id"),
        )
    ]
