"""The client of the examining process: starts it, asks it, ends it."""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

from interposer._contract.errors import InterposerError

_log = logging.getLogger("interposer")

_PROGRAM = """
import json, sys
# The working directory last: its modules are not meant to stand in for what this needs itself.
sys.path[:] = sorted(json.loads(sys.argv[1]), key=bool, reverse=True)
from interposer_sandbox._fork_server import main
main()
"""
# It tells that it lives every second, but not while it imports torch.
_SILENCE_SECONDS = 150.0
_END_SECONDS = 3.0


class ExaminationError(InterposerError):
    """Code cannot be examined in another process; the text says why."""


class UnavailableError(ExaminationError):
    """This system or program has no process that could examine anything."""


class _Gone(Exception):
    """The examining process has ended."""


class _Process:
    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise UnavailableError("this program has no interpreter of its own to start")
        if not hasattr(os, "fork"):
            raise UnavailableError(f"{sys.platform} cannot fork")
        _log.info("Examining plugins in another process; it is remembered what was found.")
        # Without -P a json.py in the working directory would run first.
        flags = ["-P", *(["-I"] if sys.flags.isolated else []), "-W", "ignore"]
        command = [sys.executable, *flags, "-c", _PROGRAM, json.dumps(_path())]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            # A session of its own, so that the terminal's Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
            )
        except OSError as error:
            raise UnavailableError(f"{sys.executable} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the finding on a request, as JSON.

        Raises: _Gone: the process has ended, or is silent.
        """
        line = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while line:
                line = line[self._questions.write(line) :]
        except BrokenPipeError:
            raise _Gone from None
        answer = b""
        while not answer.endswith(b"\n") or answer.isspace():  # empty lines say that it lives
            speaks = self.has_ended(_SILENCE_SECONDS, or_answers=True)
            chunk = self._answers.read(1 << 16) if speaks else b""
            if not chunk:
                raise _Gone
            answer += chunk
        self._reap()
        return json.loads(answer)

    def has_ended(self, seconds: float = 0.0, *, or_answers: bool = False) -> bool:
        """Say whether the process has ended, or does so within ``seconds``."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN if or_answers else 0)
        return bool(poll.poll(seconds * 1000))

    def stop(self) -> None:
        """End the process and everything that it forked; it needs a moment for the latter."""
        self._questions.close()
        if self.has_ended(_END_SECONDS):
            self._reap()
        else:
            self.kill()
        self._answers.close()

    def kill(self) -> None:
        """End the process at once, while another thread may wait for its answer."""
        if not self.has_ended():  # else the number of its group may be that of another by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.has_ended(_END_SECONDS)
        self._reap()

    def abandon(self) -> None:
        """Forget the process in a fork of the one that it belongs to."""
        self._questions.close()
        self._answers.close()
        self._process.returncode = 0  # it is no child of this process, so there is none to wait for

    def _reap(self) -> None:
        """Take note of what was started, which left the examining process to init at once.

        So none stays as a zombie when nothing is asked any more; unless this process is init.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
            with suppress(ChildProcessError):
                while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                    pass


_lock = RLock()
_process: _Process | None = None
_forbidden = ""


def ask(name: str, arguments: dict[str, Any], seconds: float) -> Any:
    """Return the finding on a task as JSON; several threads are served one after another.

    Raises: ExaminationError: there is no process to ask, or it ends without an answer.
    """
    request = {"task": {"name": name, "arguments": arguments}, "seconds": seconds}
    request |= {"path": _path(), "cwd": _cwd()}
    global _process
    with _lock:
        for _ in range(2):  # an idle one may end at the very moment when it is asked
            if _forbidden:
                raise ExaminationError(_forbidden)
            _process = _process or _Process()
            try:
                return _process.ask(request)
            except _Gone:
                stop()
            except BaseException:
                stop()  # its answer would be taken for that to the next question
                raise
    raise ExaminationError(
        "the process that examines it ended twice without an answer, by the code or by the system"
    )


def stop() -> None:
    """End the examining process; the next question starts another."""
    global _process
    with _lock:
        if _process is not None:
            process, _process = _process, None
            process.stop()


def release() -> None:
    """Close the pipes of an examining process that has ended for want of questions."""
    if _process is not None and _lock.acquire(blocking=False):  # else somebody is asking it
        try:
            if _process is not None and _process.has_ended():
                stop()
        finally:
            _lock.release()


def forbid() -> None:
    """Refuse to examine anything from here on: this process is itself under examination."""
    global _forbidden
    _forbidden = (
        "a plugin asked for other plugins while it was examined. "
        "Try: do so when it is used, not when it is imported or probed"
    )


def _path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def _after_fork() -> None:
    global _lock, _process
    _lock = RLock()  # the thread that may hold it is not in this process
    if _process is not None:
        process, _process = _process, None
        process.abandon()


def _at_exit() -> None:
    global _forbidden
    _forbidden = "this process is ending"
    if _lock.acquire(timeout=_END_SECONDS / 10):
        stop()
        _lock.release()
    elif _process is not None:  # a thread that is not waited for is examining something
        _process.kill()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
