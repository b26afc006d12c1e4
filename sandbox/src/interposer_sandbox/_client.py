"""The client of the process that forks: starts it, asks it, ends it."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from interposer_sandbox._host import Host
from interposer_sandbox._lock import ForkSafeLock
from interposer_sandbox._task import Finding, Function

_PROGRAM = """
import json, sys
# The working directory last: its modules are not meant to stand in for what this needs itself.
sys.path[:] = sorted(json.loads(sys.argv[1]), key=bool, reverse=True)
from interposer_sandbox._fork_server import main
main(**json.loads(sys.argv[2]))
"""
# It tells that it lives every second, but not while it imports torch.
_SILENCE_SECONDS = 150.0
_END_SECONDS = 3.0


class SandboxError(Exception):
    """A function cannot be run in another process; the text says why."""


class UnavailableError(SandboxError):
    """This system or program has no process that could run anything."""


class NestedError(SandboxError):
    """This process runs foreign code itself, so that it must not ask for more of that."""


class _Gone(Exception):
    """The process that forks has ended."""


class _Process:
    def __init__(self, host: Host, starting: Callable[[], object]) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise UnavailableError("this program has no interpreter of its own to start")
        if not hasattr(os, "fork"):
            raise UnavailableError(f"{sys.platform} cannot fork")
        starting()
        # Without -P a json.py in the working directory would run first.
        flags = ["-P", *(["-I"] if sys.flags.isolated else []), "-W", "ignore"]
        names = {
            "guarded": host.guarded,
            "modules": host.modules,
            "slow_modules": host.slow_modules,
        }
        command = [sys.executable, *flags, "-c", _PROGRAM, json.dumps(_path()), json.dumps(names)]
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
        self.pid = self._process.pid

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
                os.killpg(self.pid, signal.SIGKILL)
            self.has_ended(_END_SECONDS)
        self._reap()

    def abandon(self) -> None:
        """Forget the process in a fork of the one that it belongs to."""
        self._questions.close()
        self._answers.close()
        self._process.returncode = 0  # it is no child of this process, so there is none to wait for

    def _reap(self) -> None:
        """Take note of what was started, which left the process that forks to init at once.

        So none stays as a zombie when nothing is asked any more; unless this process is init.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
            with suppress(ChildProcessError):
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass


class Sandbox:
    """Runs functions in forks of a process of its own, which starts with the first of them.

    The process ends with this one, when it is stopped, or after a minute of silence; the next
    function starts another. Threads are served one after another, and a fork of this process gets
    one of its own.

    Args:
        starting: is called whenever the process is about to start.
    """

    def __init__(self, host: Host, starting: Callable[[], object] = lambda: None) -> None:
        self._host = host
        self._starting = starting
        self._lock = ForkSafeLock()
        self._process: _Process | None = None
        _sandboxes.add(self)

    @property
    def pid(self) -> int | None:
        """The number of the group of processes that runs functions, None while there is none."""
        return self._process.pid if self._process is not None else None

    def run(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        seconds: float,
        *,
        modules: Iterable[str] = (),
    ) -> Finding:
        """Return what a function finds in a fork, or how the fork ended.

        Args:
            arguments: JSON values by name.
            seconds: limit every stage of the function that the reporter is told of.
            modules: imported before the fork, after the host's slow ones, once for all that
                follow.
        Raises:
            UnavailableError: there is no process to ask.
            NestedError: this process is itself a fork that runs a function.
            SandboxError: the process ends without an answer, twice.
        """
        request = {"function": _name(function), "arguments": dict(arguments), "seconds": seconds}
        request |= {"modules": [*modules], "path": _path(), "cwd": _cwd()}
        with self._lock.held:
            for _ in range(2):  # an idle one may end at the very moment when it is asked
                if _forbidden is not None:
                    raise type(_forbidden)(*_forbidden.args)
                self._process = self._process or _Process(self._host, self._starting)
                try:
                    return Finding.from_json(self._process.ask(request))
                except _Gone:
                    self.stop()
                except BaseException:
                    self.stop()  # its answer would be taken for that to the next question
                    raise
        raise SandboxError(
            "the process that examines it ended twice without an answer, "
            "by the code or by the system"
        )

    def stop(self) -> None:
        """End the process; the next function starts another."""
        with self._lock.held:
            if self._process is not None:
                process, self._process = self._process, None
                process.stop()

    def release(self) -> None:
        """Close the pipes of a process that has ended for want of questions."""
        # Whoever holds the lock is asking it.
        if self._process is not None and self._lock.held.acquire(blocking=False):
            try:
                if self._process is not None and self._process.has_ended():
                    self.stop()
            finally:
                self._lock.held.release()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> None:
        """End the process, as this one ends."""
        if self._lock.held.acquire(timeout=_END_SECONDS / 10):
            self.stop()
            self._lock.held.release()
        elif self._process is not None:  # a thread that is not waited for is asking it
            self._process.kill()

    def _abandon(self) -> None:
        """Forget the process, as this one is a fork of the one that it belongs to."""
        if self._process is not None:
            process, self._process = self._process, None
            process.abandon()


_sandboxes: WeakSet[Sandbox] = WeakSet()
_forbidden: SandboxError | None = None


def forbid(error: SandboxError) -> None:
    """Raise an error wherever a function is to be run from here on."""
    global _forbidden
    _forbidden = error


def _name(function: Function) -> str:
    """Return the import string of a function.

    Raises: ValueError: another process cannot import it.
    """
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", repr(function))
    if module in ("", "__main__") or not name.isidentifier():
        raise ValueError(
            f"{name} of {module or 'no module'} cannot be imported by another process. "
            "Try: define it at the top of a module"
        )
    return f"{module}:{name}"


def _path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def _after_fork() -> None:
    for sandbox in [*_sandboxes]:
        sandbox._abandon()


def _at_exit() -> None:
    forbid(SandboxError("this process is ending"))
    for sandbox in [*_sandboxes]:
        sandbox._end()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
