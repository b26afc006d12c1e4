"""The fork server: runs one function at a time, each in a fork of itself.

The server process never runs foreign code, so no function can affect a later one. Each fork has a
pipe of its own and reports in lines of JSON that contain a secret token. The server ends with the
client, or after a minute without a request.
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
import mmap
import os
import resource
import secrets
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from interposer_sandbox._client import NestedError, forbid
from interposer_sandbox._collection import paused_collection
from interposer_sandbox._functions import snapshot_for_forks
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
# Bound here, before foreign code can replace these functions.
_exit, _write, _getpid, _dumps = os._exit, os.write, os.getpid, json.dumps
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BEAT_SECONDS = 0.05
# Exit code of a fork that ended as it should: code may exit with 0 early.
_DONE_CODE = 71


class _Host(NamedTuple):
    """The settings of ``Host`` that the fork server needs: guarded names and slow modules."""

    guarded: Guarded
    slow_modules: tuple[str, ...]


def main(
    guarded: Iterable[Iterable[str]],
    modules: Iterable[str],
    slow_modules: Iterable[str],
    imports: bool,
) -> NoReturn:
    """Serve requests from descriptor 0 with answers on descriptor 1 until the client ends.

    Args:
        imports: import the slow modules before the first request.
    """
    try:
        host = _Host(Guarded(*map(tuple, guarded)), tuple(slow_modules))
        for module in modules:
            importlib.import_module(module)
        if os.fork():
            _exit(0)  # orphan the server, so that init reaps it whenever it ends
        # Ignored and blocked signals are inherited from the client.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # A crash of foreign code is a normal finding, and must not write a core file.
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        # Move the pipes away from stdin and stdout, which code may read and print to.
        request_fd, answer_fd = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in (0, 1))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)
        # Like -W ignore, but not equal to a filter that foreign code may add, which would then
        # go unnoticed.
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", message=".*")
        if sys.platform == "linux":  # adopt orphaned processes that left their group
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        snapshot_for_forks(host.guarded)
        # A garbage collection in a fork would write to, and so copy, pages shared with the server.
        gc.freeze()
        _serve(request_fd, answer_fd, host, imports and _import(host))
        _exit(0)
    except (Ended, BrokenPipeError):
        _exit(0)
    finally:
        _exit(1)


def _serve(request_fd: int, answer_fd: int, host: _Host, warm: bool) -> None:
    questions = os.fdopen(request_fd, "rb")
    while select.select([request_fd], [], [], _IDLE_SECONDS)[0] and (line := questions.readline()):
        request = json.loads(line)
        if request["modules"]:
            warm = _import(host, request["modules"])
        # Until the slow modules are imported, a fork stops at the first of them.
        awaited_module = "" if warm else "".join(host.slow_modules[:1])
        # A fork that needs slow modules returns None; the server imports them and runs it again.
        while (finding := _examine(request, request_fd, answer_fd, awaited_module)) is None:
            warm, awaited_module = _import(host), ""
        os.write(answer_fd, json.dumps(finding.to_json()).encode() + b"\n")


def _examine(
    request: dict[str, Any], request_fd: int, answer_fd: int, awaited_module: str
) -> Finding | None:
    """Run a request in a fork; return None if the server must import the slow modules first."""
    # A new token for every fork, so that no message can be forged or replayed.
    token = secrets.token_hex(16)
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    pid = os.fork()
    if pid == 0:
        _run_in_fork(
            request, token, Pipes(*writers), [request_fd, answer_fd, *readers], awaited_module
        )
    for descriptor in writers:
        os.close(descriptor)
    try:
        watch = Watch(pid, Pipes(*readers), request["seconds"], token)
        return watch.follow(request_fd, answer_fd)
    finally:
        for descriptor in readers:
            os.close(descriptor)
        _end_orphans()


def _end_orphans() -> None:
    """Kill the processes that a function left running, in every process group."""
    deadline = time.monotonic() + DEATH_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            # Killed processes become children of this one and are reaped here.
            if not os.waitpid(-1, os.WNOHANG)[0]:
                for pid in children_of(os.getpid()):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)


def _import(host: _Host, extra_modules: Iterable[str] = ()) -> bool:
    """Import trusted modules once; the fork repeats a failing import and reports the error."""
    modules = (*host.slow_modules, *extra_modules)
    if not all(module in sys.modules for module in modules):
        # A module that hangs here would hang in the client as well, so the server may end.
        signal.alarm(_WARM_SECONDS)
        with paused_collection():
            for module in modules:
                with suppress(BaseException):
                    importlib.import_module(module)
            signal.alarm(0)
            snapshot_for_forks(host.guarded)
            gc.freeze()
    return True


def _run_in_fork(
    request: dict[str, Any], token: str, pipes: Pipes, private: list[int], awaited_module: str
) -> NoReturn:
    """Run a function in this freshly forked process, report the finding and exit.

    Args:
        private: descriptors of the server, which are closed.
        awaited_module: the first slow module; the fork stops at its import. Empty if the server
            has tried to import the slow modules.
    """
    try:
        # A new process group, so that the watch can kill this process with its descendants.
        os.setsid()
        if sys.platform == "linux":  # end with the server, however it ends
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with suppress(OSError):  # out of memory, the system kills this process first
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        for descriptor in private:
            os.close(descriptor)
        # Printing is forbidden until ``unmute`` redirects the output to ``pipes.output``.
        os.dup2(pipes.quiet, 1)
        os.dup2(pipes.quiet, 2)
        os.close(pipes.quiet)
        output = _move_high(pipes.output)
        faulthandler.enable(output, all_threads=False)
        faulthandler.register(DUMP_SIGNAL, output, all_threads=True)
        forbid(NestedError("foreign code that runs in the sandbox must not start another sandbox"))
        reporter = _PipeReporter(_move_high(pipes.lines), output, token)
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        with suppress(OSError):
            os.chdir(request["cwd"])
        if awaited_module:
            sys.meta_path.insert(0, _SlowFinder(awaited_module, reporter))
        atexit._clear()  # drop handlers of the server; only those of the function are called
        try:
            module, _, name = request["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            finding = run_here(function, request["arguments"], reporter)
            if finding:
                reporter.begin("ending the process")
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            reporter.end(finding)
        except BaseException as error:  # noqa: BLE001 - code may raise its own
            reporter.end(Finding.raised(reporter.stage, error))
    finally:
        _exit(FAILED_CODE)


def _move_high(descriptor: int) -> int:
    """Move a descriptor to a high number, which code does not close by accident."""
    hidden = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100 + secrets.randbelow(100))
    os.close(descriptor)
    return hidden


class _PipeReporter(Reporter):
    """Sends the progress of this process to the server's ``Watch``."""

    alone = True

    def __init__(self, lines: int, output: int, token: str) -> None:
        super().__init__()
        self._lines = lines
        self._output = output
        self._token = token
        self._pid = _getpid()
        self._lock = _thread.allocate_lock()
        self._beats = False
        # Counts the signs of life of a fork.
        self._pulse: mmap.mmap | None = None

    def begin(self, stage: str, patience: float = 1.0) -> None:
        super().begin(stage)
        # Only long stages need signs of life; a thread costs time in every fork.
        if patience > 1 and not self._beats:
            self._beats = True
            _thread.start_new_thread(self._beat, ())
        self.send(begin=stage, patience=patience)

    def _beat(self) -> None:
        """Send signs of life, which prove that other threads get the interpreter's lock."""
        last = b""
        while True:
            time.sleep(_BEAT_SECONDS)
            count = self._pulse[:8] if self._pulse is not None else b""
            if self._pulse is None or count != last:
                self.send(beat=True)
            last = count

    def fork(self, work: Callable[[], object]) -> int:
        pulse = mmap.mmap(-1, mmap.PAGESIZE)
        pid = os.fork()
        if pid == 0:
            self._run_fork(work, pulse)
        self._pulse = pulse
        # The fork knows the token so far.
        token = secrets.token_hex(16)
        self.send(next_token=token)
        self._token = token
        return pid

    def _run_fork(self, work: Callable[[], object], pulse: mmap.mmap) -> NoReturn:
        try:
            os.close(self._lines)
            _thread.start_new_thread(_count, (pulse,))
            if work():
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            _flush()
            _exit(_DONE_CODE)
        finally:
            _exit(FAILED_CODE)

    def join(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            # The fork has printed its traceback already.
            faulthandler.disable()
            with suppress(OSError, ValueError):  # such as SIGKILL, which has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(self._pid, -code)
        if code != _DONE_CODE:
            _exit(code)

    def note(self, **facts: Any) -> None:
        super().note(**facts)
        self.send(note=facts)

    def unmute(self) -> None:
        _flush()
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)

    def end(self, finding: Finding) -> NoReturn:
        """Send the finding and exit without running any exit handler."""
        _flush()
        self.send(finding=finding.to_json())
        _exit(0)

    def send(self, **message: Any) -> None:
        if _getpid() != self._pid:  # the code forked, and only the original process reports
            _exit(0)
        line = memoryview(_dumps({"token": self._token, **message}).encode() + b"\n")
        try:
            with self._lock:
                # A write to a full pipe may be partial.
                while line:
                    line = line[_write(self._lines, line) :]
        except OSError:  # the code closed this pipe
            _exit(FAILED_CODE)


class _SlowFinder:
    """Ends the fork at the import of a slow module, so that the server imports the module first."""

    def __init__(self, awaited_module: str, reporter: _PipeReporter) -> None:
        self._awaited = awaited_module
        self._reporter = reporter

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._awaited:
            self._reporter.send(warm=True)
            _exit(0)


def _count(pulse: mmap.mmap) -> None:
    """Increment a counter in shared memory, as proof that this process's threads still run."""
    number = 0
    while True:
        number += 1
        pulse[:8] = number.to_bytes(8, "little")
        time.sleep(_BEAT_SECONDS / 2)


def _flush() -> None:
    """Flush the output of Python and of native code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    _libc.fflush(None)
