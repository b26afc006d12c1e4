"""The commands of rank 0 to the ranks that follow it, over a socket of one host."""

from __future__ import annotations

import pickle
import socket
import struct
from contextlib import suppress
from typing import Any, Literal

Kind = Literal["step", "decision", "call", "report"]
_KINDS: tuple[Kind, ...] = ("step", "decision", "call", "report")
# Kind, flags, and a digest or the number of bytes that follow: all that a plain step sends.
_HEADER = struct.Struct("<BBI")


class Channel:
    """One end of a connection to another rank. Both are of one program, so that calls are pickles.

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
        """Send the pickle of a call, or of what comes of one."""
        head = _HEADER.pack(_KINDS.index("call"), 0, len(payload))
        self._connection.sendall(head + payload)

    def receive(self, timeout_seconds: float | None = None) -> tuple[Kind, int, int]:
        """Return the kind, the flags and the number of what comes next.

        Raises:
            EOFError: the other end is closed.
            TimeoutError: nothing came within that time.
        """
        self._connection.settimeout(timeout_seconds)
        kind, flags, number = _HEADER.unpack(self._bytes(_HEADER.size))
        return _KINDS[kind], flags, number

    def receive_call(self, number: int) -> Any:
        """Return what was pickled, behind its header."""
        return pickle.loads(self._bytes(number))

    def close(self) -> None:
        """Close this end, upon which the other one ends, whatever of its reports was not read."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._connection.close()

    def _bytes(self, number: int) -> bytes:
        found = bytearray()
        while len(found) < number:
            try:
                part = self._connection.recv(number - len(found))
            except ConnectionResetError:  # it left something unread
                part = b""
            if not part:
                raise EOFError
            found += part
        return bytes(found)
