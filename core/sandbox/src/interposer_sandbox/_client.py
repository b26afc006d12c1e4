"""The client of the fork server: starts the server, sends requests, stops the server."""

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
# The working directory comes last, so that its modules do not shadow imports of this program.
sys.path[:] = sorted(json.loads(sys.argv[1]), key=bool, reverse=True)
from interposer_sandbox._fork_server import main
main(**json.loads(sys.argv[2]))
"""
# The server sends a sign of life every second, but not while it imports torch.
_SILENCE_SECONDS = 150.0
# Time for the server to kill its forks and to exit.
_END_SECONDS = 3.0


class SandboxError(Exception):
    """A function cannot be run in another process; the text says why."""


class UnavailableError(SandboxError):
    """This system or program cannot start a process that runs functions."""


class NestedError(SandboxError):
    """A fork that runs foreign code tried to start another such fork."""


class _ServerEnded(Exception):
    """The fork server ended before it answered a request."""


class _ForkServer:
    def __init__(self, host: Host, starting: Callable[[], object], imports: bool = False) -> None:
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
            "imports": imports,
        }
        command = [sys.executable, *flags, "-c", _PROGRAM, json.dumps(_path()), json.dumps(names)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            # A new session, so that Ctrl-C in the terminal does not reach the server.
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
        """Send a request to the fork server, and return the finding as JSON.

        Raises: _ServerEnded: the server has ended, or is silent.
        """
        line = memoryview(json.dumps(request).encode() + b"\n")
        try:
            # The pipe is unbuffered, so a write may be partial.
            while line:
                line = line[self._questions.write(line) :]
        except BrokenPipeError:
            raise _ServerEnded from None
        answer = b""
        while not answer.endswith(b"\n") or answer.isspace():  # empty lines are signs of life
            has_data = self.has_ended(_SILENCE_SECONDS, or_answers=True)
            chunk = self._answers.read(1 << 16) if has_data else b""
            if not chunk:
                raise _ServerEnded
            answer += chunk
        self._reap()
        return json.loads(answer)

    def has_ended(self, seconds: float = 0.0, *, or_answers: bool = False) -> bool:
        """Tell whether the server has ended, or ends within ``seconds``."""
        poll = select.poll()
        # Without events, poll still reports that the other end was closed.
        poll.register(self._answers, select.POLLIN if or_answers else 0)
        return bool(poll.poll(seconds * 1000))

    def stop(self) -> None:
        """Stop the fork server, which ends all of its forks before it exits."""
        self._questions.close()
        if self.has_ended(_END_SECONDS):
            self._reap()
        else:
            self.kill()
        self._answers.close()

    def kill(self) -> None:
        """Kill the server at once, even while another thread waits for an answer."""
        if not self.has_ended():  # otherwise another process group may have reused the id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.has_ended(_END_SECONDS)
        self._reap()

    def abandon(self) -> None:
        """Close this fork's copies of the pipes, without stopping the parent's server."""
        self._questions.close()
        self._answers.close()
        self._process.returncode = 0  # not a child of this process, so do not wait

    def _reap(self) -> None:
        """Reap the started process, which exits as soon as it has forked the server.

        If this process is init, the loop also reaps members of the server's process group.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
            with suppress(ChildProcessError):
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass


class Sandbox:
    """Runs functions in forks of a separate server process.

    The first ``run`` starts the server. The server ends with this process, after ``stop``, or after
    a minute without a request; the next ``run`` then starts another server. Threads take turns. A
    fork of this process starts a server of its own.

    Args:
        starting: called whenever a server is about to start.
    """

    def __init__(self, host: Host, starting: Callable[[], object] = lambda: None) -> None:
        self._host = host
        self._starting = starting
        self._lock = ForkSafeLock()
        self._process: _ForkServer | None = None
        _sandboxes.add(self)

    @property
    def pid(self) -> int | None:
        """The process group of the server, or None while no server runs."""
        return self._process.pid if self._process is not None else None

    def run(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        seconds: float,
        *,
        modules: Iterable[str] = (),
    ) -> Finding:
        """Run a function in a fork and return the finding; a crash or timeout is a refusal.

        Args:
            arguments: JSON values by name.
            seconds: time limit of every stage that the function reports.
            modules: imported by the server before the fork, after the host's slow modules, so that
                later calls need not import the same modules again.
        Raises:
            UnavailableError: no process can be started.
            NestedError: this process is itself a fork that runs a function.
            SandboxError: the server ended twice without an answer.
        """
        request = {"function": _name(function), "arguments": dict(arguments), "seconds": seconds}
        request |= {"modules": [*modules], "path": _path(), "cwd": _cwd()}
        with self._lock.held:
            for _ in range(2):  # an idle server may end just before the request arrives
                if _forbidden is not None:
                    raise type(_forbidden)(*_forbidden.args)
                self._process = self._process or _ForkServer(self._host, self._starting)
                try:
                    return Finding.from_json(self._process.ask(request))
                except _ServerEnded:
                    self.stop()
                except BaseException:
                    self.stop()  # the next request would read the answer to this one
                    raise
        raise SandboxError(
            "the process that examines it ended twice without an answer, "
            "by the code or by the system"
        )

    def start(self) -> None:
        """Start the server, which imports the slow modules while this process does other work.

        Does nothing if a server runs, or if none can be started: ``run`` raises the reason.
        """
        with self._lock.held, suppress(UnavailableError):
            if self._process is None and _forbidden is None:
                self._process = _ForkServer(self._host, self._starting, imports=True)

    def stop(self) -> None:
        """Stop the server; the next ``run`` starts another."""
        with self._lock.held:
            if self._process is not None:
                process, self._process = self._process, None
                process.stop()

    def release(self) -> None:
        """Close the pipes of a server that ended after idling."""
        # A thread that holds the lock is using the server.
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

    def _stop_at_exit(self) -> None:
        if self._lock.held.acquire(timeout=_END_SECONDS / 10):
            self.stop()
            self._lock.held.release()
        elif self._process is not None:  # a daemon thread still waits for an answer
            self._process.kill()

    def _abandon(self) -> None:
        """Forget the connection to the server, in a fork of the process that started the server."""
        if self._process is not None:
            process, self._process = self._process, None
            process.abandon()


_sandboxes: WeakSet[Sandbox] = WeakSet()
_forbidden: SandboxError | None = None


def forbid(error: SandboxError) -> None:
    """Make every later ``Sandbox.run`` of this process raise ``error``."""
    global _forbidden
    _forbidden = error


def _name(function: Function) -> str:
    """Return the import string of a function.

    Raises: ValueError: another process cannot import the function.
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
    # Other objects are allowed on the path, but cannot be sent as JSON.
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
        sandbox._stop_at_exit()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
