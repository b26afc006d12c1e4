"""Remains of code that has run: printed text, threads and processes."""

from __future__ import annotations

import _thread
import faulthandler
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_PRINTED_LIMIT = 200
_STREAMS = ("stdout", "stderr")
# A joined thread may still be listed for a moment, and a started thread not yet.
_GRACE_SECONDS = 0.02
# The timer thread of faulthandler ends within this time after its cancellation.
_FUSE_SECONDS = 0.005
# Threads of these packages end by themselves once they are idle.
_POOLS = frozenset({"concurrent", "multiprocessing"})

_num_forks = 0


def streams(shared: bool) -> Iterator[str]:
    """Yield "" while code runs, then describe replaced streams and printed text.

    Args:
        shared: another thread may replace the streams meanwhile.
    """
    captures = {name: _Capture(_without_ended_captures(getattr(sys, name))) for name in _STREAMS}
    sys.stdout, sys.stderr = captures.values()
    yield ""
    for name, capture in captures.items():
        capture.owner = 0
        if getattr(sys, name) is not capture:
            if shared:
                continue  # another thread replaced the stream, and restores it itself
            yield f"replaces sys.{name}"
        setattr(sys, name, _without_ended_captures(capture.stream))
    printed = "".join(text for capture in captures.values() for text in capture.texts)
    if printed:
        yield f"prints {printed[:_PRINTED_LIMIT]!r}"


def offspring(light: bool, calls: bool, package: str) -> Iterator[str]:
    """Yield "" while code runs, then describe forks, threads and processes of the code.

    Args:
        light: forbid every thread and process. Otherwise libraries may leave some running.
        calls: forbid threads of the package itself and threads that run a function of the standard
            library, even if ``light`` is false.
        package: the top-level package of the code.
    """
    forks, had_children = _num_forks, _has_children()
    threads, num_threads, num_tasks = set(threading.enumerate()), _thread._count(), _num_tasks()
    yield ""
    # A fork that already ended leaves no child, so forks are counted.
    if _num_forks > forks:
        yield "forks the process"
    elif light and _has_children() and not had_children:
        yield "leaves a process running"
    deadline = time.monotonic() + _GRACE_SECONDS
    while _num_tasks() > num_tasks and time.monotonic() < deadline:
        time.sleep(0.001)
    if _num_tasks() > num_tasks and _cancel_fault_timer():
        yield "sets a time at which faulthandler ends the process or prints"
    if threading.current_thread() is threading.main_thread() and signal.set_wakeup_fd(-1) != -1:
        yield "sets a file descriptor for signals"
    if not (light or calls):
        return
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        new_threads = [thread for thread in threading.enumerate() if thread not in threads]
        # The module threading does not know threads that were started by lower-level functions.
        num_unknown = _thread._count() - num_threads - len(new_threads)
        if time.monotonic() > deadline:
            break
        if not new_threads and num_unknown <= 0 and _num_tasks() <= num_tasks:
            return
        time.sleep(0.001)
    for name in sorted(thread.name for thread in new_threads if light or _is_own(thread, package)):
        yield f"leaves the thread {name!r} running"
    if num_unknown > 0 and light:
        yield f"leaves {num_unknown} thread(s) without a name running"


class _Capture(io.TextIOBase):
    """A stream that keeps the beginning of its own thread's output and drops the rest.

    Output of other threads, and all output once ``owner`` is 0, goes to the original stream.
    """

    encoding = "utf-8"

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.owner = threading.get_ident()
        self.texts: list[str] = []
        self.stream = stream
        self._num_remaining = _PRINTED_LIMIT

    def write(self, text: str, /) -> int:
        if threading.get_ident() != self.owner:
            return int(self.stream.write(text)) if self.stream is not None else len(text)
        if text and self._num_remaining > 0:
            self.texts.append(str(text)[: self._num_remaining])
            self._num_remaining -= len(text)
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


def _without_ended_captures(stream: Any) -> Any:
    """Return ``stream`` without the captures of ended ``with`` blocks around the stream."""
    while isinstance(stream, _Capture) and not stream.owner:
        stream = stream.stream
    return stream


def origin(value: Any) -> str:
    """Return the top-level package of the code of a function, module or object.

    The code's globals are used because ``functools.wraps`` copies ``__module__``.
    """
    code = getattr(value, "__func__", value)
    name = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", None)
    if isinstance(value, ModuleType):
        name = value.__name__
    return str(name or type(value).__module__).partition(".")[0]


def _is_own(thread: threading.Thread, package: str) -> bool:
    root = origin(getattr(thread, "_target", None) or type(thread).run)
    return root == package or (root in sys.stdlib_module_names and root not in _POOLS)


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


def _has_children() -> bool:
    """Tell whether a child process exists, including one that ended and was not reaped."""
    if hasattr(os, "waitid"):
        with suppress(OSError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return True
    return False


def _cancel_fault_timer() -> bool:
    """Cancel the timer of faulthandler, and tell whether one was set."""
    before, deadline = _num_tasks(), time.monotonic() + _FUSE_SECONDS
    faulthandler.cancel_dump_traceback_later()
    while _num_tasks() >= before and time.monotonic() < deadline:
        time.sleep(0.0005)
    return _num_tasks() < before


def _num_tasks() -> int:
    """Return the system's count of threads in this process; 0 if unknown."""
    try:
        return Path("/proc/self/task").stat().st_nlink
    except OSError:
        return 0
