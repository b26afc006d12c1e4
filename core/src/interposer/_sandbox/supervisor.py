"""The watch over a forked process: what it tells, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from typing import Any

from interposer._contract.verdict import Verdict
from interposer._sandbox.child import DUMP_SIGNAL, FAILED_CODE, Order, Pipes
from interposer._sandbox.task import Finding

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_DUMP_SECONDS = 0.1
_DEATH_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16
_MOST_CHUNKS = 16
_HEAD_BYTES = 800
_PRINTED_LIMIT = 200
_TAIL_BYTES = 16_000
_LINE_BYTES = 4_000_000
# These come from outside as a rule: somebody ends processes, or memory ran out.
_PASSING = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Ended(Exception):
    """Nobody is left who wants the answer."""


class Watch:
    """Follows one subject to its end, and ends it where it must.

    Attributes:
        wants_torch: it ended because torch should be imported first.
    """

    def __init__(self, order: Order, pid: int, pipes: Pipes) -> None:
        self.wants_torch = False
        self._order = order
        self._pid = pid
        self._pipes = pipes
        self._open = {pipes.lines, pipes.quiet, pipes.output}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        self._finding: Finding | None = None
        self._facts: dict[str, Any] = {}
        self._unread = b""
        self._head = b""
        self._tail = b""
        self._code: int | None = None
        self._late = False
        self._begin("starting", 1.0)

    def follow(self, asking: int, answering: int) -> Finding:
        """Return what the subject found, or how it ended.

        Args:
            asking: ends when nobody wants the answer any more.
            answering: is sent an empty line every second.

        Raises: Ended: ``asking`` ended; the subject is killed.
        """
        try:
            self._await_end(asking, answering)
            self._late = not (self._told or self._gone)
            if self._late:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, DUMP_SIGNAL)
                self._await_death(_DUMP_SECONDS)
                self._code = None
            elif not self._told:
                self._await_death(_DEATH_SECONDS)
        finally:
            self._kill()
        self._read()
        return self._told_finding() if self._finding else self._refusal()

    @property
    def _told(self) -> bool:
        return self._finding is not None or self.wants_torch

    @property
    def _gone(self) -> bool:
        return self._code is not None or self._pipes.lines not in self._open

    def _await_end(self, asking: int, answering: int) -> None:
        beat = time.monotonic()
        while not (self._told or self._gone):
            ready, _, _ = select.select([asking, *self._open], [], [], _POLL_SECONDS)
            if asking in ready:  # nothing is asked before this is answered, so this is the end
                raise Ended
            self._read()
            if not ready:
                self._wait()
            now = time.monotonic()
            if now > self._deadline:
                return
            if now > beat + _BEAT_SECONDS:
                beat = now
                os.write(answering, b"\n")

    def _await_death(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._code is None and time.monotonic() < deadline:
            self._read()
            self._wait()
            if self._code is None:
                time.sleep(0.0005)

    def _wait(self) -> None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)

    def _kill(self) -> None:
        """End the subject and all of its group; one that the system holds on to is left behind."""
        code = self._code
        for kill in (os.killpg, os.kill) if code is None else (os.killpg,):
            with suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)
        self._await_death(_DEATH_SECONDS)
        self._code = code

    def _read(self) -> None:
        for descriptor in [*self._open]:
            for _ in range(_MOST_CHUNKS):
                try:
                    chunk = os.read(descriptor, _CHUNK_BYTES)
                except BlockingIOError:
                    break
                if not chunk:
                    self._open.discard(descriptor)
                    break
                if descriptor == self._pipes.lines:
                    self._take(chunk)
                    continue
                if descriptor == self._pipes.quiet and len(self._head) < _HEAD_BYTES:
                    self._head += chunk[:_HEAD_BYTES]
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _take(self, chunk: bytes) -> None:
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, RecursionError):  # not what a subject tells
                self._understand(json.loads(line))
        if len(self._unread) > _LINE_BYTES:
            self._open.discard(self._pipes.lines)

    def _understand(self, message: Any) -> None:
        if not isinstance(message, dict) or message.pop("token", "") != self._order.token:
            return
        match message:
            case {"begin": str(stage), "patience": float(patience)}:
                self._begin(stage, patience)
            case {"note": dict(facts)}:
                self._facts |= facts
            case {"warm": True}:
                self.wants_torch = True
            case {"finding": found} if self._finding is None:
                self._finding = Finding.from_json(found)

    def _begin(self, stage: str, patience: float) -> None:
        self._stage = stage
        self._limit_seconds = patience * self._order.seconds
        self._deadline = time.monotonic() + self._limit_seconds

    def _told_finding(self) -> Finding:
        assert self._finding is not None
        verdict = self._finding.verdict
        if verdict and self._head and self._order.task.name == "plugin":
            printed = self._head.decode(errors="backslashreplace")[:_PRINTED_LIMIT]
            verdict = Verdict.refuse(f"prints {printed!r} while it is imported and asked")
        return Finding(verdict, {**self._facts, **self._finding.facts})

    def _refusal(self) -> Finding:
        """Return the refusal of a subject that told nothing, with the end of what it printed."""
        facts = self._facts
        match self._code:
            case _ if self._late:
                facts["limit_seconds"] = self._order.seconds
                reason = f"took longer than {self._limit_seconds:g} s"
            case None:
                reason = "closed the pipe of its examination"
            case code if code < 0:
                name = signal.Signals(-code).name if -code in set(signal.Signals) else f"{-code}"
                facts["passing"] = -code in _PASSING
                reason = (
                    f"killed by {name}" if name.startswith("SIG") else f"killed by signal {name}"
                )
            case code if code == FAILED_CODE:
                reason = "closed the pipe of its examination"
            case code:
                reason = f"exited with code {code}"
        printed = self._tail.decode(errors="backslashreplace").partition("\nExtension modules:")[0]
        return Finding.refused(f"{reason} while {self._stage}", printed.strip(), **facts)
