"""The commands of rank 0 to the ranks that follow it, over a pair of sockets without a name.

No other process can connect to it: a follower inherits its end from rank 0.
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
# Kind, flags, and a digest or the number of bytes that follow: all that a plain step sends.
_HEADER = struct.Struct("<BBI")
_MOST_BYTES = 2**32 - 1  # of a call
_PIECE_BYTES = 1 << 20  # memory is taken as bytes come, not as a header says


class Channel:
    """One end of a connection to another rank.

    Args:
        connection: connected, of a stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, kind: Kind, flags: int = 0, number: int = 0) -> None:
        """Send a header alone.

        Raises: OSError: the other end is closed.
        """
        self._connection.sendall(_HEADER.pack(_KINDS.index(kind), flags, number))

    def send_call(self, payload: bytes) -> None:
        """Send a call, or what comes of one, as ``encode`` has it.

        Raises:
            ConfigError: it is longer than a message can be.
            OSError: the other end is closed.
        """
        if len(payload) > _MOST_BYTES:
            raise ConfigError(
                f"{len(payload)} bytes are to cross to other ranks at once, and {_MOST_BYTES} can. "
                "Try: fewer tensors in each call"
            )
        head = _HEADER.pack(_KINDS.index("call"), 0, len(payload))
        self._connection.sendall(head + payload)

    def receive(self, timeout_seconds: float | None = None) -> tuple[Kind, int, int]:
        """Return the kind, the flags and the number of what comes next.

        Raises:
            EOFError: the other end is closed.
            ValueError: it is of no kind that a rank sends.
            TimeoutError: nothing came within that time.
        """
        self._connection.settimeout(timeout_seconds)
        kind, flags, number = _HEADER.unpack(self._bytes(_HEADER.size))
        if kind >= len(_KINDS):
            raise ValueError(f"{kind} is no kind of message between ranks")
        return _KINDS[kind], flags, number

    def receive_call(self, number: int) -> Any:
        """Return the value of a call of so many bytes, which follow its header.

        Raises: CodecError: they are none that a rank sends.
        """
        return decode(self._bytes(number))

    def close(self) -> None:
        """Close this end, upon which the other one ends, whatever of its reports was not read."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._connection.close()

    def _bytes(self, number: int) -> bytes:
        found = bytearray()
        while len(found) < number:
            try:
                part = self._connection.recv(min(number - len(found), _PIECE_BYTES))
            except ConnectionResetError:  # it left something unread
                part = b""
            if not part:
                raise EOFError
            found += part
        return bytes(found)
