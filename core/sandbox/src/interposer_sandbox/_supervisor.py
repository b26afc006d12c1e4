"""The watch over a forked process: reads reports and output, and kills a late process."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from interposer_sandbox._task import Finding

FAILED_CODE = 70
"""The exit code of a child process that could not send its finding."""

DUMP_SIGNAL = signal.SIGUSR2
"""The signal that makes a child process print the tracebacks of all threads."""

DEATH_SECONDS = 1.0
"""Time limit for the end of a killed process."""

# A passed deadline is noticed at most this much later.
_POLL_SECONDS = 0.05
# Interval of the empty lines that tell the client that the server is alive.
_BEAT_SECONDS = 1.0
# Time for a late process to print the tracebacks of its threads.
_DUMP_SECONDS = 0.1
# On a busy machine, a working process may get no processor time for shorter periods.
_LEAST_SECONDS = 1.0
# A working process uses more than this share of a processor, a waiting one less.
_WORKING_FRACTION = 0.02
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_CHUNK_BYTES = 1 << 16
_MOST_CHUNKS = 16
# A character of the quoted output has up to four bytes in UTF-8.
_HEAD_BYTES = 800
_PRINTED_LIMIT = 200
# A crashing process prints its traceback last, so the end of the output is kept.
_TAIL_BYTES = 16_000
_LINE_BYTES = 4_000_000
# These signals usually come from outside: from a user, or from the system when memory runs out.
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Ended(Exception):
    """The client has disconnected, so nothing reads the finding."""


class Pipes(NamedTuple):
    """One end of the three pipes between a child process and its watch.

    Attributes:
        lines: messages of the child process.
        quiet: output printed while printing is forbidden.
        output: later output, and the traceback of a crash.
    """

    lines: int
    quiet: int
    output: int


class Watch:
    """Follows one child process to the end, and kills a process that exceeds a limit.

    Args:
        seconds: time limit of every stage of the task.
        token: part of every message of the child process; unknown to foreign code.
    """

    def __init__(self, pid: int, pipes: Pipes, seconds: float, token: str) -> None:
        self._pid = pid
        self._pipes = pipes
        self._seconds = seconds
        self._token = token
        self._open = set(pipes)
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        self._finding: Finding | None = None
        self._facts: dict[str, Any] = {}
        self._wants_imports = False
        self._unread = b""
        self._head = b""
        self._tail = b""
        self._code: int | None = None
        self._late = ""
        self._used = self._deadline = self._beaten = self._checked = 0.0
        self._begin("starting", 1.0)

    def follow(self, request_fd: int, answer_fd: int) -> Finding | None:
        """Return the process's finding, or a refusal that says how the process ended.

        None means that the server must import the slow modules and repeat the request.

        Args:
            request_fd: reaches end of file when the client has gone.
            answer_fd: receives an empty line every second.

        Raises: Ended: ``request_fd`` reached end of file; the process is killed.
        """
        try:
            self._await_end(request_fd, answer_fd)
            ending, facts = self._ending()
        finally:
            self._kill()
        # Output that the process wrote before it ended may still be in the pipes.
        self._read()
        if self._wants_imports:
            return None
        if self._finding is None:
            # The end of the output, without the list of native modules that faulthandler adds.
            text = self._tail.decode(errors="backslashreplace")
            printed = text.partition("\nExtension modules:")[0].strip()
            return Finding.refuse(f"{ending} while {self._stage}", printed, **self._facts, **facts)
        # Accepted code must not have printed while printing was forbidden.
        if self._finding and self._head:
            printed = self._head.decode(errors="backslashreplace")[:_PRINTED_LIMIT]
            reason = f"prints {printed!r} while it is imported and asked"
            return Finding.refuse(reason, **self._finding.facts)
        return self._finding

    @property
    def _has_answered(self) -> bool:
        return self._finding is not None or self._wants_imports

    @property
    def _has_exited(self) -> bool:
        return self._code is not None or self._pipes.lines not in self._open

    def _await_end(self, request_fd: int, answer_fd: int) -> None:
        beat = time.monotonic()
        while not (self._has_answered or self._has_exited):
            ready, _, _ = select.select([request_fd, *self._open], [], [], _POLL_SECONDS)
            # The client sends nothing before the answer, so the pipe can only be closed.
            if request_fd in ready:
                raise Ended
            self._read()
            if not ready:
                self._reap()
            now = time.monotonic()
            self._late = self._lateness(now)
            if self._late:
                return
            if now > beat + _BEAT_SECONDS:
                beat = now
                os.write(answer_fd, b"\n")

    def _lateness(self, now: float) -> str:
        """Describe how a stage exceeded its limit; empty while it may continue.

        A stage with more patience must prove progress: the process or a descendant must use
        processor time, and other threads must get the interpreter's lock.
        """
        if now > self._deadline:
            return f"did not return within {self._limit_seconds:g} s"
        # Only stages with more patience than usual must prove that they work.
        if self._limit_seconds > self._seconds:
            seconds = max(self._seconds, _LEAST_SECONDS)
            if now > self._beaten + seconds:
                return f"did not return within {seconds:g} s, holding the interpreter's lock"
            if now > self._checked + seconds:
                used_seconds, self._checked = _processor_seconds(self._pid), now
                if (
                    used_seconds is not None
                    and used_seconds - self._used < _WORKING_FRACTION * seconds
                ):
                    # The last sign of life of a fork can be later than the stage's begin.
                    is_silent = now > self._beaten + seconds / 2
                    how = (
                        "holding the interpreter's lock" if is_silent else "waiting without working"
                    )
                    return f"did not return within {seconds:g} s, {how}"
                self._used = used_seconds or 0.0
        return ""

    def _ending(self) -> tuple[str, dict[str, Any]]:
        """Return how a process without a finding ended, such as a signal or timeout, and facts."""
        if self._has_answered:
            return "", {}
        # A late process: let it print the tracebacks of its threads before it is killed.
        if not self._has_exited:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, DUMP_SIGNAL)  # a fork of the process prints its traceback too
            self._await_death(_DUMP_SECONDS)
            return self._late, {"limit_seconds": self._seconds}
        self._await_death(DEATH_SECONDS)
        code = self._code
        if code is None or code == FAILED_CODE:
            return "closed the pipe of its examination", {}
        if code >= 0:
            return f"exited with code {code}", {}
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}", {"passing": -code in _EXTERNAL_SIGNALS}

    def _await_death(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._code is None and time.monotonic() < deadline:
            self._read()
            self._reap()
            if self._code is None:
                time.sleep(0.0005)

    def _reap(self) -> None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)

    def _kill(self) -> None:
        """Kill the process and its group; give up on a process that is stuck in the kernel."""
        # A process that is still starting has no group of its own yet.
        for kill in (os.killpg, os.kill) if self._code is None else (os.killpg,):
            with suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)
        self._await_death(DEATH_SECONDS)

    def _read(self) -> None:
        for descriptor in [*self._open]:
            # Bounded, so that endless output does not keep the watch from its deadlines.
            for _ in range(_MOST_CHUNKS):
                try:
                    chunk = os.read(descriptor, _CHUNK_BYTES)
                except BlockingIOError:
                    break
                if not chunk:
                    self._open.discard(descriptor)
                    break
                if descriptor == self._pipes.lines:
                    self._read_lines(chunk)
                    continue
                if descriptor == self._pipes.quiet and len(self._head) < _HEAD_BYTES:
                    self._head += chunk[:_HEAD_BYTES]
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _read_lines(self, chunk: bytes) -> None:
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, RecursionError):  # foreign code wrote it
                self._handle_message(json.loads(line))
        # A line without an end would fill the memory; treat the process as gone.
        if len(self._unread) > _LINE_BYTES:
            self._open.discard(self._pipes.lines)

    def _handle_message(self, message: Any) -> None:
        if not isinstance(message, dict) or message.pop("token", "") != self._token:
            return
        match message:
            case {"begin": str(stage), "patience": float(patience)}:
                self._begin(stage, patience)
            case {"next_token": str(token)}:
                self._token = token
            case {"beat": True}:
                self._beaten = time.monotonic()
            case {"note": dict(facts)}:
                self._facts |= facts
            case {"warm": True}:
                self._wants_imports = True
            # Only the first finding counts, even if code finds out the token.
            case {"finding": finding} if self._finding is None:
                self._finding = Finding.from_json(finding)

    def _begin(self, stage: str, patience: float) -> None:
        self._stage = stage
        self._limit_seconds = patience * self._seconds
        self._beaten = self._checked = now = time.monotonic()
        self._deadline = now + self._limit_seconds
        self._used = _processor_seconds(self._pid) or 0.0 if patience > 1 else 0.0


def children_of(pid: int) -> Iterator[int]:
    """Yield the child processes of a process; none if the system lists no children."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text("ascii").split())


def _processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process and its descendants; None if unknown."""
    try:
        # The second field is a name, which may contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    own_seconds = sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
    return own_seconds + sum(_processor_seconds(child) or 0.0 for child in children_of(pid))
