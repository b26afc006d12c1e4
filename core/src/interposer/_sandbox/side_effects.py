"""What code does to the process around it, found by comparing before and after."""

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
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import is_
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from interposer._config.environment import environment_guard

_PRINTED_LIMIT = 200
# A thread that was joined may still be listed for a moment, and one that was started not yet be.
_THREAD_GRACE_SECONDS = 0.02
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
_HOOKS = ("displayhook", "excepthook", "unraisablehook")
_STREAMS = ("stdout", "stderr")


class Witness:
    """A block after which ``effects`` says what the code in it did beside its work.

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

    def __enter__(self) -> Witness:
        self.effects = []
        self._shared = not self.alone and threading.active_count() > 1
        if not self._shared:
            self._note_process()
        if self.light:
            self._streams = (_heard_by_none(sys.stdout), _heard_by_none(sys.stderr))
            self._ears = (_Ear(self._streams[0]), _Ear(self._streams[1]))
            sys.stdout, sys.stderr = self._ears
        self._builtins = dict(vars(builtins))
        return self

    def _note_process(self) -> None:
        self._guard: AbstractContextManager[list[str]] = environment_guard()
        self._variables = self._guard.__enter__()
        self._modules = dict(sys.modules)
        self._path = (sys.path, [*sys.path])
        self._cwd = _cwd()
        self._handlers = [_getsignal(number) for number in _SIGNALS]
        self._settings = _torch_settings()
        self._values = [setting.get() for setting in self._settings]
        if self.light:
            self._hooks = [getattr(sys, name) for name in _HOOKS]
            self._threads = set(threading.enumerate())
            self._num_threads = _thread._count()
            self._num_tasks = _num_tasks()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # First, and without calling any: the rest needs them.
        now, before = builtins.__dict__, self._builtins
        changed = [name for name in before if name not in now or now[name] is not before[name]]
        added = [name for name in now if name not in before]
        now.update(before)
        for name in added:
            del now[name]
        note = self.effects.append
        for name in changed:
            note(f"replaces builtins.{name}")
        for name in added:
            note(f"adds builtins.{name}")
        if self.light:
            self._compare_streams(note)
        if not self._shared:
            self._compare_process(note)

    def _compare_process(self, note: Callable[[str], None]) -> None:
        if self.light:
            self._compare_hooks(note)
        self._guard.__exit__(None, None, None)
        variables = [name for name in self._variables if not name.startswith(_TORCHS_OWN)]
        if variables:
            note(f"changes the environment: {', '.join(sorted(variables))}")
        self._compare_modules(note)
        if sys.path is not self._path[0] or sys.path != self._path[1]:
            note("changes sys.path")
            sys.path = self._path[0]
            sys.path[:] = self._path[1]
        if _cwd() != self._cwd:
            note("changes the working directory")
            with contextlib.suppress(OSError):  # it may be gone
                os.chdir(self._cwd)
        self._compare_handlers(note)
        for setting, value in zip(self._settings, self._values, strict=True):
            if setting.get() != value:
                note(f"changes torch's {setting.name}")
                setting.put(value)
        if self.alone and self.light:
            self._compare_threads(note)

    def _compare_modules(self, note: Callable[[str], None]) -> None:
        before, now = self._modules, sys.modules
        if all(map(is_, before.values(), map(now.get, before))):
            return
        for name, module in before.items():
            if now.get(name) is not module:
                verb = "replaces" if name in now else "removes"
                note(f"{verb} the module {name!r}")
                now[name] = module

    def _compare_handlers(self, note: Callable[[str], None]) -> None:
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if _getsignal(number) is not handler:
                note(f"installs a handler for {number.name}")
                if handler is not None and threading.current_thread() is threading.main_thread():
                    signal.signal(number, handler)

    def _compare_hooks(self, note: Callable[[str], None]) -> None:
        for name, value in zip(_HOOKS, self._hooks, strict=True):
            if getattr(sys, name) is not value:
                note(f"replaces sys.{name}")
                setattr(sys, name, value)

    def _compare_streams(self, note: Callable[[str], None]) -> None:
        for name, stream, ear in zip(_STREAMS, self._streams, self._ears, strict=True):
            ear.owner = 0
            if getattr(sys, name) is not ear:
                if self._shared:
                    continue  # another thread has put its own there, and takes it away again
                note(f"replaces sys.{name}")
            setattr(sys, name, _heard_by_none(stream))
        printed = "".join(text for ear in self._ears for text in ear.heard)
        if printed:
            note(f"prints {printed[:_PRINTED_LIMIT]!r}")

    def _compare_threads(self, note: Callable[[str], None]) -> None:
        deadline = time.monotonic() + _THREAD_GRACE_SECONDS
        while True:
            left = [thread for thread in threading.enumerate() if thread not in self._threads]
            # The module threading does not know those that were started below it.
            nameless = _thread._count() - self._num_threads - len(left)
            if time.monotonic() > deadline:
                break
            if not left and nameless <= 0 and _num_tasks() <= self._num_tasks:
                return
            time.sleep(0.001)
        for name in sorted(thread.name for thread in left):
            note(f"leaves the thread {name!r} running")
        if nameless > 0:
            note(f"leaves {nameless} thread(s) without a name running")


class _Ear(io.TextIOBase):
    """A stream that keeps the first of what its thread writes; the rest passes it by.

    What other threads write, and everything once the owner is 0, goes on to where it would have.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.owner = threading.get_ident()
        self.heard: list[str] = []
        self._left = _PRINTED_LIMIT
        self.stream = stream

    def write(self, text: str, /) -> int:
        if threading.get_ident() != self.owner:
            return int(self.stream.write(text)) if self.stream is not None else len(text)
        if text and self._left > 0:
            self.heard.append(str(text)[: self._left])
            self._left -= len(text)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return int(self.stream.fileno())

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def _heard_by_none(stream: Any) -> Any:
    """Return the stream below ears whose block has ended; another thread may have kept one."""
    while isinstance(stream, _Ear) and not stream.owner:
        stream = stream.stream
    return stream


class _Setting(NamedTuple):
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _torch_settings() -> list[_Setting]:
    """Return torch's global settings, if this process uses torch at all."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_float32_matmul_precision"):
        return []  # not there, or another thread is importing it
    return [
        _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Setting("default device", torch.get_default_device, torch.set_default_device),
        _Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
        _Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(
            "deterministic mode",
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        _Setting(
            "float32 precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
    ]


def _cwd() -> str:
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
