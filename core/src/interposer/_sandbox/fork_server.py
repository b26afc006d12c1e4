"""The examining process: does one task at a time, each in a fork of itself.

It runs no plugin's code itself, so that nothing one plugin does is still there for the next. A
fork tells in lines of JSON with a token, on a pipe that only it has. The process ends when nobody
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
from typing import Any, NoReturn

from interposer._sandbox import client
from interposer._sandbox.functions import hold_for_forks
from interposer._sandbox.inspection import COMPARISON, perform
from interposer._sandbox.supervisor import (
    DEATH_SECONDS,
    DUMP_SIGNAL,
    FAILED_CODE,
    Ended,
    Pipes,
    Watch,
    children_of,
)
from interposer._sandbox.task import Finding, Reporter, Task

_IDLE_SECONDS = 60.0
_WARM_SECONDS = 120
# Imported once here instead of in each fork, but only when they are needed.
_TORCH = ("torch", "interposer._contract.layer", "interposer._contract.platform")
# Fake tensors import torch's compiler.
_TORCH_FOR_KERNELS = (*_TORCH, COMPARISON, "torch._dynamo")
# Taken before a plugin can replace them.
_exit, _write, _getpid, _dumps = os._exit, os.write, os.getpid, json.dumps
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BEAT_SECONDS = 0.05


def main() -> NoReturn:
    """Answer requests on descriptor 0 with lines on descriptor 1 until there are no more."""
    try:
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
        hold_for_forks()
        gc.freeze()
        _serve(asking, answering)
        _exit(0)
    except (Ended, BrokenPipeError):
        _exit(0)
    finally:
        _exit(1)


def _serve(asking: int, answering: int) -> None:
    warm = False
    questions = os.fdopen(asking, "rb")
    while select.select([asking], [], [], _IDLE_SECONDS)[0] and (line := questions.readline()):
        request = json.loads(line)
        if request["task"]["name"] == "kernel":
            warm = _import(_TORCH_FOR_KERNELS)
        while (finding := _examine(request, asking, answering, warm)) is None:
            warm = _import(_TORCH)
        os.write(answering, json.dumps(finding.to_json()).encode() + b"\n")


def _examine(request: dict[str, Any], asking: int, answering: int, warm: bool) -> Finding | None:
    """Return what a fork found, or None if it wants torch to be imported first."""
    token = secrets.token_hex(16)
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    pid = os.fork()
    if pid == 0:
        _do(request, token, Pipes(*writers), [asking, answering, *readers], warm)
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
    """End the processes that a task left behind, in whatever group they are."""
    deadline = time.monotonic() + DEATH_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                for pid in children_of(os.getpid()):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)


def _import(modules: Iterable[str]) -> bool:
    """Import what is trusted, once; a module that fails is met again, and told of, in a fork."""
    if not all(module in sys.modules for module in modules):
        # Whoever hangs here hangs in the process that asks as well.
        signal.alarm(_WARM_SECONDS)
        for module in modules:
            with suppress(BaseException):
                importlib.import_module(module)
        signal.alarm(0)
        hold_for_forks()
        gc.freeze()
    return True


def _do(
    request: dict[str, Any], token: str, pipes: Pipes, private: list[int], warm: bool
) -> NoReturn:
    """Do a task in this freshly forked process, tell what was found and leave.

    Args:
        private: descriptors of the examining process, which are closed.
        warm: torch is imported, or cannot be.
    """
    try:
        os.setsid()
        if sys.platform == "linux":  # leaves with the examining process, however that ends
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
        client.forbid()
        teller = _Teller(_hidden(pipes.lines), output, token)
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        with suppress(OSError):
            os.chdir(request["cwd"])
        if not warm:
            sys.meta_path.insert(0, _TorchFinder(teller))
        atexit._clear()  # so that those of the task alone are called
        try:
            finding = perform(Task(**request["task"]), teller)
            if finding.verdict:
                teller.begin("ending the process")
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            teller.end(finding)
        except BaseException as error:  # noqa: BLE001 - a plugin may raise its own
            teller.end(Finding.raised(teller.stage, error))
    finally:
        _exit(FAILED_CODE)


def _hidden(descriptor: int) -> int:
    """Move a descriptor to a number that plugins don't close by the way."""
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
        if _getpid() != self._pid:  # the plugin forked, and one of the two tells
            _exit(0)
        line = memoryview(_dumps({"token": self._token, **message}).encode() + b"\n")
        try:
            with self._lock:
                while line:
                    line = line[_write(self._lines, line) :]
        except OSError:  # the plugin closed what is not its own
            _exit(FAILED_CODE)


class _TorchFinder:
    """Leaves at the first import of torch, to be done again by a process that has torch.

    The import takes longer than a plugin may.
    """

    def __init__(self, teller: _Teller) -> None:
        self._teller = teller

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            self._teller.tell(warm=True)
            _exit(0)


def _flush() -> None:
    """Hand on what was printed, by native code as well."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    _libc.fflush(None)
