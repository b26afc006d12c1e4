"""The side effects of code on the process around it, found by comparing before and after."""

from __future__ import annotations

import _thread
import builtins
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from interposer._config.config import environment_guard

_PRINTED_LIMIT = 200
# A thread that was joined may still be listed for a moment, and one that was started not yet be.
_THREAD_GRACE_SECONDS = 0.02
_STREAMS = ("stdout", "stderr")
_HOOKS = ("displayhook", "excepthook", "unraisablehook")
_SIGNALS = [
    getattr(signal, name)
    for name in (
        *("SIGABRT", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT"),
        *("SIGPIPE", "SIGQUIT", "SIGSEGV", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"),
    )
    if hasattr(signal, name)
]
# The plain function: that of the module turns every answer into an enum first.
_getsignal = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
# torch's compiler sets these when it is first imported.
_TORCHS_OWN = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
# Settings of torch, each with the functions that get and set it.
_TORCH_SETTINGS = (
    ("default dtype", "get_default_dtype", "set_default_dtype"),
    ("default device", "get_default_device", "set_default_device"),
    ("number of threads", "get_num_threads", "set_num_threads"),
    ("gradient mode", "is_grad_enabled", "set_grad_enabled"),
    ("deterministic mode", "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    ("float32 precision", "get_float32_matmul_precision", "set_float32_matmul_precision"),
)


class SideEffects:
    """Lists in ``effects`` what the code in a ``with`` block did beside its work.

    Each effect completes a sentence: "replaces builtins.print". What can be put back is: the
    environment, builtins, modules, the working directory, ``sys.path`` and hooks of ``sys``,
    signal handlers, settings of torch. What the block raises passes.

    Args:
        light: the code is that of a plugin module, which has no reason to print, to leave a
            thread or to hook into the interpreter. Libraries that a target loads may do these.
        alone: this process is there for the block only, so that a new thread is one of the
            block's. In any other, what all threads share is compared only while there is but
            one: else changes of the others would be blamed on the block, and undone.
    """

    def __init__(self, light: bool = True, alone: bool = True) -> None:
        self.light = light
        self.alone = alone
        self.effects: list[str] = []

    def __enter__(self) -> SideEffects:
        shared = not self.alone and threading.active_count() > 1
        self.effects = []
        self._comparisons: list[Iterator[str]] = []
        if self.light:
            self._comparisons += [_streams(shared)]
        if self.light and not shared:
            self._comparisons += [_hooks()]
        if not shared:
            self._comparisons += [_environment(), _modules(), _path(), _cwd(), _handlers()]
            self._comparisons += [_torch()]
        if self.light and self.alone:
            self._comparisons += [_threads()]
        for comparison in self._comparisons:
            next(comparison)
        self._builtins = dict(vars(builtins))
        return self

    def __exit__(self, *raised: object) -> None:
        # First, and without calling any: the rest needs them.
        now, before = builtins.__dict__, self._builtins
        changed = _changed(now, before)
        added = [name for name in now if name not in before]
        now.update(before)
        for name in added:
            del now[name]
        self.effects += [f"replaces builtins.{name}" for name in changed]
        self.effects += [f"adds builtins.{name}" for name in added]
        for comparison in self._comparisons:
            self.effects += comparison


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names that are gone or mean something else; no builtin function is called."""
    return [name for name in before if name not in now or now[name] is not before[name]]


# Each of these looks at one part of the process, and yields once to let the block run. Then it
# looks again, puts back what it can and yields the effects.


def _streams(shared: bool) -> Iterator[str]:
    captures = {name: _Capture(_lasting(getattr(sys, name))) for name in _STREAMS}
    sys.stdout, sys.stderr = captures.values()
    yield ""
    for name, capture in captures.items():
        capture.owner = 0
        if getattr(sys, name) is not capture:
            if shared:
                continue  # another thread has put its own there, and takes it away again
            yield f"replaces sys.{name}"
        setattr(sys, name, _lasting(capture.stream))
    printed = "".join(text for capture in captures.values() for text in capture.kept)
    if printed:
        yield f"prints {printed[:_PRINTED_LIMIT]!r}"


def _hooks() -> Iterator[str]:
    before = {name: getattr(sys, name) for name in _HOOKS}
    yield ""
    for name in _changed(vars(sys), before):
        setattr(sys, name, before[name])
        yield f"replaces sys.{name}"


def _environment() -> Iterator[str]:
    with environment_guard() as changed:
        yield ""
    names = [name for name in changed if not name.startswith(_TORCHS_OWN)]
    if names:
        yield f"changes the environment: {', '.join(names)}"


def _modules() -> Iterator[str]:
    before = dict(sys.modules)
    yield ""
    for name in _changed(sys.modules, before):
        yield f"{'replaces' if name in sys.modules else 'removes'} the module {name!r}"
        sys.modules[name] = before[name]


def _path() -> Iterator[str]:
    path, entries = sys.path, [*sys.path]
    yield ""
    if sys.path is not path or path != entries:
        sys.path = path
        path[:] = entries
        yield "changes sys.path"


def _cwd() -> Iterator[str]:
    before = _working_directory()
    yield ""
    if _working_directory() != before:
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(before)
        yield "changes the working directory"


def _handlers() -> Iterator[str]:
    before = [_getsignal(number) for number in _SIGNALS]
    yield ""
    for number, handler in zip(_SIGNALS, before, strict=True):
        if _getsignal(number) is not handler:
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
            yield f"installs a handler for {number.name}"


def _torch() -> Iterator[str]:
    torch = sys.modules.get("torch")
    settings = []
    if hasattr(torch, "set_float32_matmul_precision"):  # else another thread may be importing it
        for name, get, put in _TORCH_SETTINGS:
            settings.append((name, getattr(torch, get), getattr(torch, put)))
    before = [get() for _, get, _ in settings]
    yield ""
    for (name, get, put), value in zip(settings, before, strict=True):
        if get() != value:
            put(value)
            yield f"changes torch's {name}"


def _threads() -> Iterator[str]:
    before, num_threads, num_tasks = set(threading.enumerate()), _thread._count(), _num_tasks()
    yield ""
    deadline = time.monotonic() + _THREAD_GRACE_SECONDS
    while True:
        left = [thread for thread in threading.enumerate() if thread not in before]
        # The module threading does not know those that were started below it.
        nameless = _thread._count() - num_threads - len(left)
        if time.monotonic() > deadline:
            break
        if not left and nameless <= 0 and _num_tasks() <= num_tasks:
            return
        time.sleep(0.001)
    for name in sorted(thread.name for thread in left):
        yield f"leaves the thread {name!r} running"
    if nameless > 0:
        yield f"leaves {nameless} thread(s) without a name running"


class _Capture(io.TextIOBase):
    """A stream that keeps the first of what its thread writes; the rest passes it by.

    What other threads write, and everything once the owner is 0, goes on to where it would have.
    """

    encoding = "utf-8"

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.owner = threading.get_ident()
        self.kept: list[str] = []
        self.stream = stream
        self._left = _PRINTED_LIMIT

    def write(self, text: str, /) -> int:
        if threading.get_ident() != self.owner:
            return int(self.stream.write(text)) if self.stream is not None else len(text)
        if text and self._left > 0:
            self.kept.append(str(text)[: self._left])
            self._left -= len(text)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def fileno(self) -> int:
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return int(self.stream.fileno())

    def writable(self) -> bool:
        return True


def _lasting(stream: Any) -> Any:
    """Return the stream below captures whose block has ended; another thread may have kept one."""
    while isinstance(stream, _Capture) and not stream.owner:
        stream = stream.stream
    return stream


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _num_tasks() -> int:
    """Return how many threads the system counts in this process; 0 where it does not tell."""
    try:
        return Path("/proc/self/task").stat().st_nlink
    except OSError:
        return 0
