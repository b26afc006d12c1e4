"""The remains of code: text on the standard streams, threads and processes."""

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
# A thread that was joined may still be listed for a moment, and one that was started not yet be.
_GRACE_SECONDS = 0.02
# The thread of faulthandler that was told to end does so in less.
_FUSE_SECONDS = 0.005
# Their threads end when nothing is left to do for them.
_POOLS = frozenset({"concurrent", "multiprocessing"})

_num_forks = 0


def streams(shared: bool) -> Iterator[str]:
    """Yield once to let code run, then what it printed and which streams it replaced.

    Args:
        shared: another thread may put its own streams there meanwhile.
    """
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


def offspring(light: bool, calls: bool, package: str) -> Iterator[str]:
    """Yield once to let code run, then the threads and processes that it left behind.

    Args:
        light: none may be left. Else libraries may leave threads and processes.
        calls: a thread of the package itself, or one that only runs a function of Python's own,
            may not be left either.
        package: the top-level package of the code.
    """
    forks, had_children = _num_forks, _has_children()
    threads, num_threads, num_tasks = set(threading.enumerate()), _thread._count(), _num_tasks()
    yield ""
    if _num_forks > forks:
        yield "forks the process"
    elif light and _has_children() and not had_children:
        yield "leaves a process behind"
    deadline = time.monotonic() + _GRACE_SECONDS
    while _num_tasks() > num_tasks and time.monotonic() < deadline:
        time.sleep(0.001)
    if _num_tasks() > num_tasks and _had_a_fuse():
        yield "sets a time at which faulthandler ends the process or prints"
    if threading.current_thread() is threading.main_thread() and signal.set_wakeup_fd(-1) != -1:
        yield "sets a file descriptor for signals"
    if not (light or calls):
        return
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        left = [thread for thread in threading.enumerate() if thread not in threads]
        # The module threading does not know those that were started below it.
        nameless = _thread._count() - num_threads - len(left)
        if time.monotonic() > deadline:
            break
        if not left and nameless <= 0 and _num_tasks() <= num_tasks:
            return
        time.sleep(0.001)
    for name in sorted(thread.name for thread in left if light or _is_own(thread, package)):
        yield f"leaves the thread {name!r} running"
    if nameless > 0 and light:
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


def origin(value: Any) -> str:
    """Return the top-level package of the code behind a function, module or object.

    ``functools.wraps`` gives a function the ``__module__`` of another.
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
    """Say whether a child process is there, even one that ended without being waited for."""
    if hasattr(os, "waitid"):
        with suppress(OSError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return True
    return False


def _had_a_fuse() -> bool:
    """Take back the time that faulthandler was set to, if any, and say whether there was one."""
    before, deadline = _num_tasks(), time.monotonic() + _FUSE_SECONDS
    faulthandler.cancel_dump_traceback_later()
    while _num_tasks() >= before and time.monotonic() < deadline:
        time.sleep(0.0005)
    return _num_tasks() < before


def _num_tasks() -> int:
    """Return how many threads the system counts in this process; 0 where it does not tell."""
    try:
        return Path("/proc/self/task").stat().st_nlink
    except OSError:
        return 0
