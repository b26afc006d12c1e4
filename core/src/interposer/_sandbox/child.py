"""The forked process that runs a plugin's code once and tells what it found.

It is forked from the examining process, which never runs a plugin's code itself, so that nothing
one plugin does is still there for the next. It tells in lines of JSON with a token, on a pipe
that only it has.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from interposer._contract.errors import FOREIGN_ERRORS
from interposer._sandbox import client as process
from interposer._sandbox.task import Finding, Reporter, Task
from interposer._sandbox.tasks import perform

FAILED_CODE = 70
"""What a subject exits with that could not tell anything."""

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a subject print where all its threads are."""

# Taken before a plugin can replace them.
_exit, _write, _getpid, _dumps = os._exit, os.write, os.getpid, json.dumps
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Order:
    """A task with the circumstances to do it in; ``seconds`` limit every stage of it."""

    task: Task
    seconds: float
    path: list[str]
    cwd: str
    token: str


@dataclass(frozen=True, slots=True)
class Pipes:
    """One end of the three pipes between a subject and its watch.

    Attributes:
        lines: what it tells.
        quiet: what is printed while nothing should be.
        output: what is printed later, and the traceback of a crash.
    """

    lines: int
    quiet: int
    output: int


def become_subject(order: Order, pipes: Pipes, private: list[int], warm: bool) -> NoReturn:
    """Do a task in this freshly forked process, tell what was found and leave.

    Args:
        private: descriptors of the examining process, which are closed.
        warm: torch is imported, or cannot be.
    """
    try:
        os.setsid()
        if sys.platform == "linux":  # leaves with the examining process, however that ends
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in private:
            os.close(descriptor)
        os.dup2(pipes.quiet, 1)
        os.dup2(pipes.quiet, 2)
        os.close(pipes.quiet)
        output = _hidden(pipes.output)
        faulthandler.enable(output, all_threads=False)
        faulthandler.register(DUMP_SIGNAL, output, all_threads=True)
        process.forbid()
        reporter = _Subject(_hidden(pipes.lines), output, order.token)
        sys.path[:] = order.path
        importlib.invalidate_caches()
        with suppress(OSError):
            os.chdir(order.cwd)
        if not warm:
            sys.meta_path.insert(0, _WarmFinder(reporter))
        with _Everything(reporter):
            reporter.end(perform(order.task, reporter))
    finally:
        _exit(FAILED_CODE)


def _hidden(descriptor: int) -> int:
    """Move a descriptor to a number that plugins don't close by the way."""
    hidden = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100 + secrets.randbelow(100))
    os.close(descriptor)
    return hidden


class _Subject(Reporter):
    alone = True

    def __init__(self, lines: int, output: int, token: str) -> None:
        super().__init__()
        self._lines = lines
        self._output = output
        self._token = token
        self._pid = _getpid()

    def begin(self, stage: str, patience: float = 1.0) -> None:
        super().begin(stage)
        self._send(begin=stage, patience=patience)

    def note(self, **facts: Any) -> None:
        self._send(note=facts)

    def unmute(self) -> None:
        _flush()
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)

    def warm(self) -> NoReturn:
        """Ask for another process, in which torch is imported already."""
        self._send(warm=True)
        _exit(0)

    def end(self, finding: Finding) -> NoReturn:
        """Tell the finding and leave, past everything that was to be run at the end."""
        _flush()
        self._send(finding=finding.to_json())
        _exit(0)

    def _send(self, **message: Any) -> None:
        if _getpid() != self._pid:  # the plugin forked, and one of the two tells
            _exit(0)
        line = memoryview(_dumps({"token": self._token, **message}).encode() + b"\n")
        try:
            while line:
                line = line[_write(self._lines, line) :]
        except OSError:  # the plugin closed what is not its own
            _exit(FAILED_CODE)


class _Everything:
    """Turns whatever is raised, of any class, into a finding."""

    def __init__(self, reporter: _Subject) -> None:
        self._reporter = reporter

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._reporter.end(Finding.raised(self._reporter.stage, error))


class _WarmFinder:
    """Notices the first import of torch, which takes longer than a plugin may."""

    def __init__(self, reporter: _Subject) -> None:
        self._reporter = reporter

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            self._reporter.warm()


def _flush() -> None:
    """Hand on what was printed, by native code as well."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(*FOREIGN_ERRORS):
            stream.flush()
    _libc.fflush(None)
