"""Messages between rank 0 and follower ranks, over pairs of unnamed sockets.

A follower inherits a socket from rank 0, so that no other process can connect.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any, Literal

from interposer.errors import ConfigError
from interposer_models._parallel.codec import decode

Kind = Literal["step", "decision", "call", "report"]
_KINDS: tuple[Kind, ...] = ("step", "decision", "call", "report")
# Kind, flags, and a digest or the number of bytes that follow. A plain step sends nothing else.
_HEADER = struct.Struct("<BBI")
_MAX_CALL_BYTES = 2**32 - 1
_PIECE_BYTES = 1 << 20  # allocate memory as bytes arrive, not by the header's number


class Channel:
    """One end of a connection to another rank.

    Args:
        connection: a connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, kind: Kind, flags: int = 0, number: int = 0) -> None:
        """Send a message without content.

        Raises: OSError: the other end is closed.
        """
        self._connection.sendall(_HEADER.pack(_KINDS.index(kind), flags, number))

    def send_call(self, payload: bytes) -> None:
        """Send a call, or the result of a call, that ``encode`` has converted.

        Raises:
            ConfigError: the payload exceeds the limit of a message.
            OSError: the other end is closed.
        """
        if len(payload) > _MAX_CALL_BYTES:
            raise ConfigError(
                f"A call to other ranks has {len(payload)} bytes, the limit is {_MAX_CALL_BYTES}. "
                "Try: fewer tensors in each call"
            )
        head = _HEADER.pack(_KINDS.index("call"), 0, len(payload))
        self._connection.sendall(head + payload)

    def receive(self, timeout_seconds: float | None = None) -> tuple[Kind, int, int]:
        """Receive a header, and return kind, flags and number.

        Raises:
            EOFError: the other end is closed.
            ValueError: the kind is unknown.
            TimeoutError: nothing arrived within the time limit.
        """
        self._connection.settimeout(timeout_seconds)
        kind, flags, number = _HEADER.unpack(self._bytes(_HEADER.size))
        if kind >= len(_KINDS):
            raise ValueError(f"{kind} is no kind of message between ranks")
        return _KINDS[kind], flags, number

    def receive_call(self, number: int) -> Any:
        """Receive ``number`` bytes after a header, and return the decoded value.

        Raises: CodecError: the bytes are no encoded value.
        """
        return decode(self._bytes(number))

    def close(self) -> None:
        """Close this end, which ends the other rank; unread reports are dropped."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._connection.close()

    def _bytes(self, number: int) -> bytes:
        content = bytearray()
        while len(content) < number:
            try:
                part = self._connection.recv(min(number - len(content), _PIECE_BYTES))
            except ConnectionResetError:  # the other end was closed with unread data
                part = b""
            if not part:
                raise EOFError
            content += part
        return bytes(content)
