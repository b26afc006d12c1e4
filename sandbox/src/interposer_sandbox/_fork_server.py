"""The process that forks: runs one function at a time, each in a fork of itself.

It runs no foreign code itself, so that nothing that one does is still there for the next. A fork
tells in lines of JSON with a token, on a pipe that only it has. The process ends when nobody
is left to ask, or after a minute of silence.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import resource
import secrets
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from interposer_sandbox._client import NestedError, forbid
from interposer_sandbox._functions import hold_for_forks
from interposer_sandbox._host import Guarded
from interposer_sandbox._supervisor import (
    DEATH_SECONDS,
    DUMP_SIGNAL,
    FAILED_CODE,
    Ended,
    Pipes,
    Watch,
    children_of,
)
from interposer_sandbox._task import Finding, Reporter, run_here

_IDLE_SECONDS = 60.0
_WARM_SECONDS = 120
# Taken before foreign code can replace them.
_exit, _write, _getpid, _dumps = os._exit, os.write, os.getpid, json.dumps
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BEAT_SECONDS = 0.05


class _Host(NamedTuple):
    """The names that this process is given of its host, see ``Host``."""

    guarded: Guarded
    slow_modules: tuple[str, ...]


def main(
    guarded: Iterable[Iterable[str]], modules: Iterable[str], slow_modules: Iterable[str]
) -> NoReturn:
    """Answer requests on descriptor 0 with lines on descriptor 1 until there are no more."""
    try:
        host = _Host(Guarded(*map(tuple, guarded)), tuple(slow_modules))
        for module in modules:
            importlib.import_module(module)
        if os.fork():
            _exit(0)  # so init reaps the other, who may end when nobody minds it any more
        # A process that ignores or blocks these hands that down.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        asking, answering = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in (0, 1))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)
        # As -W ignore does, but not equal to the filter of whoever wants to silence everybody.
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", message=".*")
        if sys.platform == "linux":  # what leaves its group and its parent is handed to this one
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        hold_for_forks(host.guarded)
        gc.freeze()
        _serve(asking, answering, host)
        _exit(0)
    except (Ended, BrokenPipeError):
        _exit(0)
    finally:
        _exit(1)


def _serve(asking: int, answering: int, host: _Host) -> None:
    warm = False
    questions = os.fdopen(asking, "rb")
    while select.select([asking], [], [], _IDLE_SECONDS)[0] and (line := questions.readline()):
        request = json.loads(line)
        if request["modules"]:
            warm = _import(host, request["modules"])
        awaited = "" if warm else "".join(host.slow_modules[:1])
        while (finding := _examine(request, asking, answering, awaited)) is None:
            warm, awaited = _import(host), ""
        os.write(answering, json.dumps(finding.to_json()).encode() + b"\n")


def _examine(request: dict[str, Any], asking: int, answering: int, awaited: str) -> Finding | None:
    """Return what a fork found, or None if it wants the slow modules to be imported first."""
    token = secrets.token_hex(16)
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    pid = os.fork()
    if pid == 0:
        _do(request, token, Pipes(*writers), [asking, answering, *readers], awaited)
    for descriptor in writers:
        os.close(descriptor)
    try:
        watch = Watch(pid, Pipes(*readers), request["seconds"], token)
        return watch.follow(asking, answering)
    finally:
        for descriptor in readers:
            os.close(descriptor)
        _end_orphans()


def _end_orphans() -> None:
    """End the processes that a function left behind, in whatever group they are."""
    deadline = time.monotonic() + DEATH_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                for pid in children_of(os.getpid()):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)


def _import(host: _Host, more: Iterable[str] = ()) -> bool:
    """Import what is trusted, once; a module that fails is met again, and told of, in a fork."""
    modules = (*host.slow_modules, *more)
    if not all(module in sys.modules for module in modules):
        # Whoever hangs here hangs in the process that asks as well.
        signal.alarm(_WARM_SECONDS)
        for module in modules:
            with suppress(BaseException):
                importlib.import_module(module)
        signal.alarm(0)
        hold_for_forks(host.guarded)
        gc.freeze()
    return True


def _do(
    request: dict[str, Any], token: str, pipes: Pipes, private: list[int], awaited: str
) -> NoReturn:
    """Run a function in this freshly forked process, tell what it found and leave.

    Args:
        private: descriptors of the process that forks, which are closed.
        awaited: the slow module that is not imported yet; empty if it is, or cannot be.
    """
    try:
        os.setsid()
        if sys.platform == "linux":  # leaves with the process that forks, however that ends
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with suppress(OSError):  # where memory runs out, this process is ended and no other
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        for descriptor in private:
            os.close(descriptor)
        os.dup2(pipes.quiet, 1)
        os.dup2(pipes.quiet, 2)
        os.close(pipes.quiet)
        output = _hidden(pipes.output)
        faulthandler.enable(output, all_threads=False)
        faulthandler.register(DUMP_SIGNAL, output, all_threads=True)
        forbid(NestedError("foreign code asks for more of it to be run"))
        teller = _Teller(_hidden(pipes.lines), output, token)
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        with suppress(OSError):
            os.chdir(request["cwd"])
        if awaited:
            sys.meta_path.insert(0, _SlowFinder(awaited, teller))
        atexit._clear()  # so that those of the function alone are called
        try:
            module, _, name = request["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            finding = run_here(function, request["arguments"], teller)
            if finding:
                teller.begin("ending the process")
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            teller.end(finding)
        except BaseException as error:  # noqa: BLE001 - code may raise its own
            teller.end(Finding.raised(teller.stage, error))
    finally:
        _exit(FAILED_CODE)


def _hidden(descriptor: int) -> int:
    """Move a descriptor to a number that code doesn't close by the way."""
    hidden = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100 + secrets.randbelow(100))
    os.close(descriptor)
    return hidden


class _Teller(Reporter):
    """Tells the watch over this process how far it has come."""

    alone = True

    def __init__(self, lines: int, output: int, token: str) -> None:
        super().__init__()
        self._lines = lines
        self._output = output
        self._token = token
        self._pid = _getpid()
        self._lock = _thread.allocate_lock()
        self._beats = False

    def begin(self, stage: str, patience: float = 1.0) -> None:
        super().begin(stage)
        if patience > 1 and not self._beats:
            self._beats = True
            _thread.start_new_thread(self._beat, ())
        self.tell(begin=stage, patience=patience)

    def _beat(self) -> None:
        """Tell on and on that other threads get the interpreter's lock."""
        while True:
            time.sleep(_BEAT_SECONDS)
            self.tell(beat=True)

    def note(self, **facts: Any) -> None:
        super().note(**facts)
        self.tell(note=facts)

    def unmute(self) -> None:
        _flush()
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)

    def end(self, finding: Finding) -> NoReturn:
        """Tell the finding and leave, past everything that was to be run at the end."""
        _flush()
        self.tell(finding=finding.to_json())
        _exit(0)

    def tell(self, **message: Any) -> None:
        if _getpid() != self._pid:  # the code forked, and one of the two tells
            _exit(0)
        line = memoryview(_dumps({"token": self._token, **message}).encode() + b"\n")
        try:
            with self._lock:
                while line:
                    line = line[_write(self._lines, line) :]
        except OSError:  # the code closed what is not its own
            _exit(FAILED_CODE)


class _SlowFinder:
    """Leaves at the first import of a slow module, to be forked again by a process that has it."""

    def __init__(self, awaited: str, teller: _Teller) -> None:
        self._awaited = awaited
        self._teller = teller

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._awaited:
            self._teller.tell(warm=True)
            _exit(0)


def _flush() -> None:
    """Hand on what was printed, by native code as well."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    _libc.fflush(None)
