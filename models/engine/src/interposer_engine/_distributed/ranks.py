"""Coordination by rank 0, which sends each call to the follower ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock, current_thread, main_thread
from typing import Any, TypeVar

from interposer.errors import InterposerError, RankError, described
from interposer_engine._distributed.codec import encode
from interposer_engine._distributed.engine import RankedLanguageModel
from interposer_engine._distributed.group import Group
from interposer_engine._distributed.protocol import (
    Channel,
    LocalCoordinator,
    check_outcomes,
    drifted,
)
from interposer_engine._sequence import TokenSequence

T = TypeVar("T")
SPECULATES = 1
REPORTS = 2
_REPORT_STEPS = 64  # between reports of the followers that they are alive
_CALL_SECONDS = 1800.0  # an adapter may be read from a slow disk
_GRACE_SECONDS = 2.0


class Losses:
    """Record of the first unexpected loss of a follower, which causes all later losses.

    Attributes:
        first: the error; None while all followers are alive.
        occurred: set together with ``first``.
        closed: followers may end.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        """Create a record without a loss.

        Args:
            end: called once, to end this process.
        """
        self.first: RankError | None = None
        self.occurred = Event()
        self.closed = False
        self._end = end
        self._lock = Lock()

    def report(self, error: RankError) -> None:
        """Record the first loss, and end this process."""
        with self._lock:
            if self.closed or self.first is not None:
                return
            self.first = error
            self.occurred.set()
            self._end()

    def close(self) -> None:
        """Accept that followers end from now on, as the model is being closed."""
        with self._lock:
            self.closed = True


class Leader:
    """Coordinator of rank 0, which sends each call to the followers before its own call.

    A follower compares the digest of each step with the local digest. If digests differ, the
    follower reports the error and ends.
    """

    is_one_program = False

    def __init__(self, channels: Sequence[Channel], losses: Losses, timeout_seconds: float) -> None:
        """Create the coordinator for followers at the other ends of open channels.

        Args:
            channels: channels to ranks 1, 2, ...
            losses: records followers that were lost.
            timeout_seconds: time limit for a report of a follower.
        """
        self._channels, self._losses = channels, losses
        self._timeout_seconds = timeout_seconds
        self._steps = 0
        self._is_report_due = False

    def call_others(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method on all followers, before the call on this rank.

        Raises: RankError: a follower was lost.
        """
        payload = encode((name, arguments, options))
        self._send(lambda channel: channel.send_call(payload))

    def call_on_all(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call a method on every rank, and return all results, those of this rank first."""
        self.call_others(name, *arguments, **options)
        result: Any = None
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - raised below, after the replies of the others
            failure = error
        replies = [self._reply(rank) for rank in range(1, len(self._channels) + 1)]
        texts = ["" if failure is None else described(failure), *(text for text, _ in replies)]
        check_outcomes(0, name, texts)
        if failure is not None:
            raise failure
        return [result, *(value for _, value in replies)]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Start a step on the followers, and check regularly that all of them are alive."""
        flags = SPECULATES * speculates
        if self._steps % _REPORT_STEPS == 0:
            # Reports are read one interval later, so that no step waits for followers.
            if self._is_report_due:
                for rank in range(1, len(self._channels) + 1):
                    self._report(rank)
            self._is_report_due = True
            flags |= REPORTS
        self._steps += 1
        self._send(lambda channel: channel.send("step", flags, digest))

    def decide(self, flag: bool) -> bool:
        """Send ``flag`` to the followers, and return ``flag``."""
        self._send(lambda channel: channel.send("decision", flag))
        return flag

    @property
    def trouble(self) -> str:
        """Reason why no step can be computed; "" while all followers are alive.

        Threads of the launcher watch the followers, so that a loss is known without a step.
        """
        lost = self._losses.first
        return "" if lost is None else f"rank {', '.join(map(str, lost.lost))} was lost"

    def reason(self, error: RankError) -> RankError:
        """Return the loss of a follower that is reported within a moment, otherwise ``error``.

        Nothing can be computed after a loss: if this is not the main thread, the main thread is
        interrupted.
        """
        self._losses.occurred.wait(_GRACE_SECONDS)
        if current_thread() is not main_thread():
            self._losses.report(error)
        return self._losses.first or error

    def close(self) -> None:
        """Do nothing: the launcher ends the follower processes."""

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
            # A report of an earlier step can precede the reply.
            while kind == "report":
                self._is_report_due = False
                kind, _, number = channel.receive(_CALL_SECONDS)
            reply: tuple[str, Any] = channel.receive_call(number)
        except (OSError, EOFError) as error:
            raise self._lost(rank, described(error)) from error
        return reply

    def _lost(self, rank: int, reason: str) -> RankError:
        return self.reason(RankError(0, f"rank {rank} is lost: {reason}", [rank]))


# Calls in which ranks of other groups can be lost while all ranks of this model live.
_WITH_OTHERS = frozenset({"update_weights"})


class FollowerCoordinator(LocalCoordinator):
    """Coordinator of a follower, which receives rank 0's decisions during a step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def decide(self, flag: bool) -> bool:
        """Receive and return the ``flag`` that rank 0 has sent."""
        kind, decision, _ = self._channel.receive()
        if kind != "decision":
            raise ValueError(f"rank 0 decided nothing, but sent a {kind}")
        return bool(decision)


class Follower:
    """Executes the calls that arrive over a channel, until the channel is closed."""

    def __init__(self, channel: Channel, group: Group) -> None:
        self._channel, self._group = channel, group
        self._model: RankedLanguageModel | None = None
        self._running: dict[int, TokenSequence] = {}
        self._speculation: Any = None
        self._steps = 0
        self._last_error = ""  # of a call that failed here, as it must have on every rank
        self._calls: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "add": self._add,
            "cancel": self._cancel,
            "logits": self._logits,
        }

    def run(self) -> None:
        """Execute commands of rank 0 until the channel is closed.

        Raises: RankError: this rank computed other tokens than rank 0.
        """
        while True:
            try:
                kind, flags, number = self._channel.receive()
            except EOFError:
                return
            if kind == "step":
                self._step(flags, number)
            elif kind == "call":
                name, arguments, options = self._channel.receive_call(number)
                if name in self._calls:
                    self._calls[name](*arguments, **options)
                else:
                    self._reply(name, arguments, options)
            else:
                raise ValueError(f"rank 0 sent a {kind} outside of a step")

    @property
    def model(self) -> RankedLanguageModel:
        """The loaded model, which exists only after rank 0 has sent the command to load."""
        assert self._model is not None
        return self._model

    def _load(self, path: str, **options: Any) -> None:
        from interposer_engine._loader import load

        try:
            model = load(path, tensor_parallel=self._group, **options)
        except Exception:
            # If rank 0 knows of the error, it reports the error to the user.
            if not self._group.is_error_shared:
                raise
            return  # rank 0 ends, and this rank with it
        assert isinstance(model, RankedLanguageModel)
        self._model, self._speculation = model, model.engine.speculation

    def _add(self, prompt: Any, params: Any, source: Any, reads_texts: bool) -> None:
        try:
            sequence = self.model.engine.add(prompt, params, source, reads_texts=reads_texts)
        except InterposerError as error:
            self._last_error = described(error)
        else:
            self._running[sequence.id] = sequence

    def _cancel(self, number: int) -> None:
        self.model.engine.cancel(self._running.pop(number))

    def _logits(self, *arguments: Any) -> None:
        try:
            self.model.engine.logits(*arguments)
        except InterposerError as error:
            self._last_error = described(error)

    def _step(self, flags: int, digest: int) -> None:
        engine = self.model.engine
        self._steps += 1
        if digest != engine.digest:
            rank = self._group.rank
            raise drifted(rank, rank, self._steps, self._last_error)
        if flags & REPORTS:
            self._channel.send("report")
        engine.speculation = self._speculation if flags & SPECULATES else None
        for event in engine.step():
            if event.sequence.finish_reason is not None:
                self._running.pop(event.sequence.id, None)

    def _reply(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        text, value = "", None
        try:
            value = getattr(self.model, name)(*arguments, **options)
        except RankError as error:
            # A lost rank of this model leaves no one to reply to.
            if name not in _WITH_OTHERS:
                raise
            text = described(error)
        except Exception as error:  # noqa: BLE001 - sent to rank 0, which compares errors
            text = described(error)
        self._channel.send_call(encode((text, value)))
