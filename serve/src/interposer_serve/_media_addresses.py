"""Reading of pictures and sounds from the HTTP addresses in requests.

A server that fetches an address for its client can be abused to reach machines that only the
server can reach. So the server fetches from no host unless its operator names the host, connects to
the address that it has checked, and follows no redirect to another host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urljoin, urlsplit

import httptools

from interposer.errors import ConfigError
from interposer_serve._errors import ApiError
from interposer_serve._limits import Limits

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host, for a port."""

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_HEADER_BYTES = 64 * 2**10
_CHUNK_BYTES = 64 * 2**10
_HOST = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::([0-9]{1,5}))?"
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def check_media_hosts(hosts: Collection[str]) -> frozenset[tuple[str, int | None]]:
    """Return the hosts of which clients may name addresses, each with its port.

    The port None allows the standard ports of HTTP and HTTPS.

    Raises: ConfigError: ``hosts`` is not a list, or an item has a scheme, a path or a wildcard.
    """
    if isinstance(hosts, str):
        raise ConfigError(f"The media hosts are {hosts!r:.100}, must be a list. Try: [{hosts!r}]")
    return frozenset(map(_checked_host, hosts))


def _checked_host(text: str) -> tuple[str, int | None]:
    if (address := _ip_address(text)) is not None:
        return str(address), None
    match = _HOST.fullmatch(text)
    host = match[1].lower() if match else ""
    port = int(match[2]) if match and match[2] else None
    if host.startswith("["):
        host = _normal(host[1:-1]) if _ip_address(host[1:-1]) is not None else ""
    if not host or not (port is None or 0 < port < 2**16):
        raise ConfigError(
            f"The media host {text!r:.100} is no name of a host. Try: the name alone, such as "
            "images.example.org or images.example.org:8443, without scheme and path"
        )
    return host, port


@dataclass(frozen=True, slots=True)
class _Target:
    """Parts of an HTTP address."""

    scheme: str
    host: str
    port: int
    path: str
    address: str

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class MediaFetcher:
    """Fetches media from the hosts that the operator of the server allows.

    Args:
        hosts: Result of ``check_media_hosts``.
        limits: Limits on size and time.
        resolve: Looks up the IP addresses of a host; by default with the system's resolver.
    """

    def __init__(
        self,
        hosts: Collection[tuple[str, int | None]],
        limits: Limits,
        resolve: Resolve | None = None,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = limits.media_bytes
        self._seconds = limits.media_seconds
        self._resolve = resolve or _resolved

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def fetch(self, address: str) -> bytes:
        """Return the content at an address.

        Raises: ApiError: the address is malformed or of another host, or its content is not
            available, too large or too slow. The message completes the name of the request field.
        """
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(self._target(address))
        except TimeoutError:
            message = f"could not be fetched within {self._seconds:g} s. {_TRY_DATA}"
            raise _refusal(address, message) from None
        except (OSError, httptools.HttpParserError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no HTTP response"
            message = f"could not be fetched: {reason or type(error).__name__}. {_TRY_DATA}"
            raise _refusal(address, message) from None

    async def _fetch(self, target: _Target) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            response = await self._response(target)
            if response.status == 200:
                if response.encoding not in ("", "identity"):
                    message = f"has the encoding {response.encoding!r:.100}, which is not read"
                    raise _refusal(target.address, message)
                return bytes(response.body)
            if response.status not in _REDIRECTS or not response.location:
                raise _refusal(target.address, f"has the status {response.status}. {_TRY_DATA}")
            try:
                next_address = urljoin(target.address, response.location)
            except ValueError:
                raise _refusal(target.address, "redirects to a malformed address") from None
            following = self._target(next_address)
            if following.host != target.host:
                message = f"redirects to another host, {following.host!r:.100}. {_TRY_DATA}"
                raise _refusal(target.address, message)
            if (target.scheme, following.scheme) == ("https", "http"):
                raise _refusal(target.address, f"redirects from HTTPS to HTTP. {_TRY_DATA}")
            target = following
        raise _refusal(target.address, f"redirects more than {_MAX_REDIRECTS} times. {_TRY_DATA}")

    def _target(self, address: str) -> _Target:
        """Parse an address of an allowed host.

        Raises: ApiError: the address is malformed, or the host is not allowed.
        """
        # urlsplit would remove line ends, which could start another header.
        if not all("!" <= letter <= "~" for letter in address):
            raise _refusal(address, "has letters that addresses must write as %XX")
        try:
            parts = urlsplit(address)
            port, host = parts.port, _normal(parts.hostname or "")
        except ValueError as error:
            raise _refusal(address, f"is malformed: {error}") from None
        if parts.scheme not in _PORTS:
            allowed = "data: or http(s):" if self._hosts else "data:"
            message = f"has the scheme {parts.scheme!r:.20}; allowed is {allowed}. {_TRY_DATA}"
            raise _refusal(address, message)
        if "@" in parts.netloc:
            raise _refusal(address, f"holds a user name. {_TRY_DATA}")
        standard = _PORTS[parts.scheme]
        port = standard if port is None else port
        allowed_ports = {port for name, port in self._hosts if name == host}
        if not (port in allowed_ports or (port == standard and None in allowed_ports)):
            message = f"is of a host that this server does not fetch from. {_TRY_DATA}"
            raise _refusal(address, message)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(parts.scheme, host, port, path, address)

    async def _response(self, target: _Target) -> _Response:
        """Send a request to a checked address of the host, and return the response.

        The host is looked up once: a second look-up could return another address than the check
        has seen.

        Raises: ApiError: an address of the host is not public, or the response is too large.
        """
        addresses = await self._resolve(target.host, target.port)
        if not all(map(self._is_allowed, addresses)):
            message = f"is of a host whose address is not public. {_TRY_DATA}"
            raise _refusal(target.address, message)
        reader, writer = await self._connection(target, addresses)
        try:
            head = f"GET {target.path} HTTP/1.1\r\nhost: {target.authority}\r\n"
            head += "accept: */*\r\naccept-encoding: identity\r\nuser-agent: interposer\r\n"
            writer.write(f"{head}connection: close\r\n\r\n".encode())
            response = _Response()
            while not response.is_complete:
                data = await reader.read(_CHUNK_BYTES)
                response.feed(data)
                if response.exceeds(self._max_bytes):
                    message = f"has more than the allowed {self._max_bytes} bytes"
                    raise _refusal(target.address, f"{message}. Try: a smaller file")
        finally:
            writer.transport.abort()
        return response

    async def _connection(
        self, target: _Target, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        is_secure = target.scheme == "https"
        for address in addresses[:-1]:
            with suppress(OSError):
                return await self._open(address, target, is_secure)
        return await self._open(addresses[-1], target, is_secure)

    async def _open(
        self, address: str, target: _Target, is_secure: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            address,
            target.port,
            ssl=self._tls if is_secure else None,
            server_hostname=target.host if is_secure else None,
        )

    def _is_allowed(self, text: str) -> bool:
        """Return whether an IP address is public, or one that the operator named."""
        address = _ip_address(text)
        if address is None:
            return False
        if any(str(address) == host for host, _ in self._hosts):
            return True
        return all(inner.is_global and not inner.is_multicast for inner in _layers(address))


class _Response:
    """Response that httptools parses.

    Attributes:
        status: HTTP status; 0 before the header is complete.
        location: Target of a redirect.
        encoding: Content encoding.
        body: Content so far.
        is_complete: Whether the response has ended.
    """

    def __init__(self) -> None:
        self.status = 0
        self.location = ""
        self.encoding = ""
        self.body = bytearray()
        self.is_complete = False
        self._has_end = False
        self._num_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; no bytes mean that the peer closed the connection.

        Raises:
            HttpParserError: The bytes are no HTTP response.
            ConnectionError: The connection was closed before the response was complete.
        """
        self._num_bytes += len(data)
        if data:
            self._parser.feed_data(data)
        elif self.status and not self._has_end:
            self.is_complete = True
        else:
            raise ConnectionError(0, "the connection was closed early")

    def exceeds(self, max_bytes: int) -> bool:
        """Return whether the body is too large, or the response has too much besides."""
        if not self.status:
            return self._num_bytes > _HEADER_BYTES
        # Chunks, their extensions and trailers can be much larger than the content.
        return len(self.body) > max_bytes or self._num_bytes > 2 * max_bytes + _HEADER_BYTES

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header that decides how the body is read; trailers have no effect."""
        if self.status:
            return
        match name.lower():
            case b"location":
                self.location = value.decode("latin-1")
            case b"content-encoding":
                self.encoding = value.decode("latin-1").lower()
            case b"content-length" | b"transfer-encoding":
                self._has_end = True

    def on_headers_complete(self) -> None:
        """Read the status; one of 100 to 199 announces another header."""
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, data: bytes) -> None:
        """Append a part of the body."""
        self.body += data

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self.is_complete = self.status > 0


_TRY_DATA = "Try: a data: address with the content in base64"


def _refusal(address: str, message: str) -> ApiError:
    return ApiError(400, f"{address:.100} {message}", code="media_not_read")


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _normal(host: str) -> str:
    """Return a host; an IP address in its usual spelling."""
    address = _ip_address(host)
    return host if address is None else str(address)


def _layers(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return an address, with the IPv4 address that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if (mapped := address.ipv4_mapped) is not None:
        return [mapped]
    inner = address.sixtofour
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return [address] if inner is None else [address, inner]


async def _resolved(host: str, port: int) -> Sequence[str]:
    """Look up the IP addresses of a host with the system's resolver."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]
