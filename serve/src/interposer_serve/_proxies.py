"""Trusted proxies, and a limit on the requests of each client of a trusted proxy."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from interposer.errors import ConfigError
from interposer_serve._errors import ApiError, respond
from interposer_serve._limits import ConnectionLimits

_UNKNOWN = "unknown"


class TrustedProxies:
    """Addresses of the proxies that state the address of their client in X-Forwarded-For.

    Attributes:
        addresses: IP addresses or networks such as ``10.0.0.0/8``.
    """

    def __init__(self, addresses: Collection[str]) -> None:
        """Parse the addresses.

        Raises: ConfigError: an address is neither an IP address nor a network.
        """
        self.addresses = tuple(addresses)
        self._networks = [_network(address) for address in addresses]

    def __contains__(self, address: str) -> bool:
        """Return whether the address belongs to a trusted proxy."""
        try:
            ip_address = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip_address in network for network in self._networks)


def _network(address: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(address)
    except ValueError as error:
        raise ConfigError(
            f"The trusted proxy {address!r:.100} is no IP address or network: {error}. "
            "Try: 127.0.0.1 or 10.0.0.0/8"
        ) from None


class ClientLimit:
    """ASGI middleware that limits the running requests of each client behind trusted proxies.

    A proxy's connections carry the requests of many clients, so they are not limited by address.
    Instead, a client may have as many running requests as an address may have connections.

    uvicorn replaces the proxy's address in ``scope["client"]`` by the address in X-Forwarded-For
    before it calls this middleware.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, proxies: TrustedProxies) -> None:
        self._app = app
        self._allowed = limits.connections_per_address
        self._proxies = proxies
        self._counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or refuse it above the limit."""
        client = scope.get("client")
        if scope["type"] != "http" or client is None or client[0] in self._proxies:
            await self._app(scope, receive, send)
            return
        address = _normalized(client[0])
        scope["client"] = (address, client[1])
        if self._counts[address] >= self._allowed:
            message = (
                f"The address {address} has reached its limit of {self._allowed} requests at once. "
                "Try: again when one of them has ended"
            )
            refusal = ApiError(503, message, code="too_many_connections")
            response = await respond(Request(scope), refusal)
            await response(scope, receive, send)
            return
        self._counts[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]


def _normalized(address: str) -> str:
    """Return the usual form of an IP address; "unknown" for text that could forge log lines."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return _UNKNOWN
