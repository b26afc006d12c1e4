"""The protocol between ranks, by which all engines run the same steps in the same order.

A ``Coordinator`` starts steps and calls on all ranks. If rank 0 has started the other ranks, it
sends calls over a ``Channel``, a pair of unnamed sockets. A follower inherits its socket, so that
no other process can connect.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

import torch

from interposer import Ranks
from interposer.errors import ConfigError, RankError, described
from interposer.tooling import gather_bytes
from interposer_engine._distributed.codec import decode, encode
from interposer_ops.communicators import TorchCommunicator

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
        """Send a message that consists of a header only.

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
        """Receive a message header, and return kind, flags and number.

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
        """Receive a call or a result of ``number`` bytes, and return the decoded value.

        Raises: CodecError: the bytes are no encoded value.
        """
        return decode(self._bytes(number))

    def close(self) -> None:
        """Close this end of the connection, which ends the other rank; drop unread reports."""
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


_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent(parent: int, lifeline: int) -> None:
    """End this process when the parent process ends, even during a computation.

    A thread waits for the end of a pipe. On Linux the kernel also kills this process, which ends a
    stopped process too.

    Args:
        parent: process id of the parent.
        lifeline: the reading end of a pipe whose other end the parent keeps open.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()


def _watch(lifeline: int) -> None:
    # Nobody writes to the pipe: it becomes readable when the parent ends.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.poll()
    os._exit(1)


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code as in ``subprocess``."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


T = TypeVar("T")
_COMPARISON_STEPS = 64  # between comparisons, which take a tenth of the time of a short step


class Coordinator(Protocol):
    """Coordinates the calls and steps of this rank with the other ranks.

    Attributes:
        is_one_program: all ranks run the same program, which makes each call on every rank and
            knows the process groups.
    """

    is_one_program: bool

    @property
    def trouble(self) -> str:
        """Reason why no step can be computed; "" if none is known."""
        ...

    def call_others(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method on the other ranks, before the call on this rank."""
        ...

    def call_on_all(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call a method on every rank, and return all results in the order of the ranks.

        Args:
            call: calls the method on this rank.
        Raises: RankError: the call failed on some ranks and succeeded on others.
        """
        ...

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Start a step on all ranks.

        Args:
            digest: digest of all requests and all computed tokens.
            fresh: requests were added since the last step.
            speculates: the step verifies draft tokens.
        """
        ...

    def decide(self, flag: bool) -> bool:
        """Return rank 0's ``flag`` on every rank, for decisions that depend on time or chance."""
        ...

    def reason(self, error: RankError) -> RankError:
        """Return the reason why ranks were lost, if known; otherwise return ``error``."""
        ...

    def close(self) -> None:
        """Release the coordinator's connections."""
        ...


class LocalCoordinator:
    """Coordinator of a single rank, whose methods act on this rank alone."""

    is_one_program = True
    trouble = ""

    def call_others(self, name: str, *arguments: Any, **options: Any) -> None:
        """Do nothing: a single rank has no other ranks to call."""

    def call_on_all(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call the function, and return a list with its result as the only element."""
        return [call()]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Do nothing at the start of a step: no other rank runs the step."""

    def decide(self, flag: bool) -> bool:
        """Return ``flag``: a single rank decides alone."""
        return flag

    def reason(self, error: RankError) -> RankError:
        """Return ``error``: a rank without peers knows no other reason."""
        return error

    def close(self) -> None:
        """Do nothing: a single rank has no connections to close."""


class PeerCoordinator(LocalCoordinator):
    """Coordinator of ranks that all run the same program, so that no commands are sent.

    The ranks compare digests at the first step of new requests, and at every 64th step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._communicator = TorchCommunicator(ranks, "cpu")
        self._steps = 0

    def call_on_all(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call the function on every rank, and return the results in the order of the ranks."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - raised below, once others know of it
            failure = error
        # Exchange the outcome even after a failure, or the other ranks would wait forever.
        text = "" if failure is None else described(failure)
        messages = gather_bytes(encode((text, result)), self._ranks.group, self._ranks.secret)
        outcomes = [decode(message) for message in messages]
        check_outcomes(self._ranks.rank, name, [error_text for error_text, _ in outcomes])
        if failure is not None:
            raise failure
        return [value for _, value in outcomes]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Compare the digests of all ranks, if requests are new or the 64th step is reached."""
        self._steps += 1
        if not fresh and self._steps % _COMPARISON_STEPS:
            return
        state = torch.tensor([[self._steps, digest, speculates]], dtype=torch.int64)
        states = self._communicator.all_gather(state, [1] * self._ranks.size).tolist()
        for rank, rank_state in enumerate(states):
            if rank_state != states[0]:
                raise drifted(self._ranks.rank, rank, self._steps)

    def decide(self, flag: bool) -> bool:
        """Return rank 0's ``flag``, which rank 0 broadcasts to all ranks."""
        flags = torch.tensor([flag], dtype=torch.uint8)
        return bool(self._communicator.broadcast(flags, 0).item())

    def close(self) -> None:
        """Close the communicator to the other ranks."""
        self._communicator.close()


def drifted(rank: int, other_rank: int, step: int, earlier_error: str = "") -> RankError:
    """Return the error for a rank whose tokens differ from rank 0's, as noticed at ``step``.

    Args:
        earlier_error: an earlier error of that rank, which may be the cause.
    """
    cause = f" Before, there: {earlier_error}." if earlier_error else ""
    return RankError(
        rank,
        f"rank {other_rank} had other requests or computed other tokens than rank 0 before step "
        f"{step}.{cause} Try: the same calls in the same order on every rank, and kernels that "
        "promise 'deterministic': Config(require='deterministic')",
        [other_rank],
    )


def check_outcomes(rank: int, name: str, texts: list[str]) -> None:
    """Raise RankError if a call failed on some ranks only.

    Args:
        texts: error of each rank; empty if the call succeeded.
    """
    failed = [failed_rank for failed_rank, text in enumerate(texts) if text]
    if failed and len(failed) < len(texts):
        raise RankError(
            rank,
            f"{name} failed on rank {failed[0]} and not on every rank, so the ranks now "
            f"differ: {texts[failed[0]]}",
            failed,
        )
