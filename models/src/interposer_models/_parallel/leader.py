"""Coordination on rank 0, which sends each of its calls to the follower ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock, current_thread, main_thread
from typing import Any, TypeVar

from interposer.errors import RankError, described
from interposer_models._parallel.channel import Channel
from interposer_models._parallel.codec import encode
from interposer_models._parallel.lead import check_outcomes

T = TypeVar("T")
SPECULATES = 1
REPORTS = 2
_EVERY = 64  # steps, at which followers say that they are there
_CALL_SECONDS = 1800.0  # an adapter may be read from a slow disk
_GRACE_SECONDS = 2.0


class Losses:
    """The loss of a follower that had not been told to end: of the first one, as nothing follows.

    Attributes:
        first: the error; None while all are there.
        known: set with it.
        closed: followers may end.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        """Know of none.

        Args:
            end: called once, so that the process ends.
        """
        self.first: RankError | None = None
        self.known = Event()
        self.closed = False
        self._end = end
        self._lock = Lock()

    def tell(self, error: RankError) -> None:
        """Keep the first one, and end the process for it."""
        with self._lock:
            if self.closed or self.first is not None:
                return
            self.first = error
            self.known.set()
            self._end()

    def close(self) -> None:
        """Let followers end from now on."""
        with self._lock:
            self.closed = True


class Leader:
    """Tells followers of each call before it is made here, in the order of the calls.

    Where a follower computes something else, it says so and ends, as it compares the digest that
    comes with each step.
    """

    is_one_program = False

    def __init__(self, channels: Sequence[Channel], losses: Losses, timeout_seconds: float) -> None:
        """Tell nothing yet.

        Args:
            channels: to the ranks from 1.
            timeout_seconds: within which followers report.
        """
        self._channels, self._losses = channels, losses
        self._timeout_seconds = timeout_seconds
        self._steps = 0
        self._awaited = False

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have a method called on the other ranks as well, before it is here.

        Raises: RankError: a follower was lost.
        """
        payload = encode((name, arguments, options))
        self._send(lambda channel: channel.send_call(payload))

    def everywhere(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Return what a call returns on every rank, this one first."""
        self.tell(name, *arguments, **options)
        own: Any = None
        failure: Exception | None = None
        try:
            own = call()
        except Exception as error:  # noqa: BLE001 - raised below, once others were heard
            failure = error
        replies = [self._reply(rank) for rank in range(1, len(self._channels) + 1)]
        texts = ["" if failure is None else described(failure), *(text for text, _ in replies)]
        check_outcomes(0, name, texts)
        if failure is not None:
            raise failure
        return [own, *(value for _, value in replies)]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Let the followers begin a step, and hear at times that they are there."""
        flags = SPECULATES * speculates
        if self._steps % _EVERY == 0:
            if self._awaited:
                for rank in range(1, len(self._channels) + 1):
                    self._report(rank)
            self._awaited = True
            flags |= REPORTS
        self._steps += 1
        self._send(lambda channel: channel.send("step", flags, digest))

    def decide(self, flag: bool) -> bool:
        """Return the flag, and tell it."""
        self._send(lambda channel: channel.send("decision", flag))
        return flag

    @property
    def trouble(self) -> str:
        """The reason why no step can be computed; empty while all followers are there.

        A thread waits for the end of each follower, so that no step is needed to know.
        """
        lost = self._losses.first
        return "" if lost is None else f"rank {', '.join(map(str, lost.lost))} was lost"

    def reason(self, error: RankError) -> RankError:
        """Return why a follower ended, where one did within a moment; else the error.

        Nothing is computed afterwards, of which the main thread is told, where it is another one.
        """
        self._losses.known.wait(_GRACE_SECONDS)
        if current_thread() is not main_thread():
            self._losses.tell(error)
        return self._losses.first or error

    def close(self) -> None:
        """Close nothing: the launcher ends the follower processes."""

    def _send(self, send: Callable[[Channel], None]) -> None:
        if self._losses.first is not None:
            raise self._losses.first
        for rank, channel in enumerate(self._channels, 1):
            try:
                send(channel)
            except OSError as error:
                raise self._lost(rank, described(error)) from error

    def _report(self, rank: int) -> None:
        limit = self._timeout_seconds
        try:
            kind, _, _ = self._channels[rank - 1].receive(limit)
        except TimeoutError as error:
            text = f"rank {rank} hangs: it computed no step within {limit:g} s"
            raise RankError(0, text, [rank]) from error
        except (OSError, EOFError) as error:
            raise self._lost(rank, "its connection ended") from error
        assert kind == "report"

    def _reply(self, rank: int) -> tuple[str, Any]:
        channel = self._channels[rank - 1]
        try:
            kind, _, number = channel.receive(_CALL_SECONDS)
            while kind == "report":
                self._awaited = False
                kind, _, number = channel.receive(_CALL_SECONDS)
            found: tuple[str, Any] = channel.receive_call(number)
        except (OSError, EOFError) as error:
            raise self._lost(rank, described(error)) from error
        return found

    def _lost(self, rank: int, reason: str) -> RankError:
        return self.reason(RankError(0, f"rank {rank} is lost: {reason}", [rank]))
