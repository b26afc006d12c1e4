"""The ends of processes that belong to another one."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent(parent: int, lifeline: int) -> None:
    """End this process when the one that started it ends, whatever this one does then.

    A thread waits for the end of a pipe. On Linux, the kernel kills besides, which ends a process
    that is stopped.

    Args:
        parent: id of the process that started this one.
        lifeline: the end of a pipe to read from, whose other end that process has.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()


def _watch(lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.poll()
    os._exit(1)


def ended(code: int) -> str:
    """Return how a process ended, by its return code as ``subprocess`` has it."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
