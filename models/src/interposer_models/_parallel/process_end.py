"""The ends of parent and child processes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_parent(parent: int, lifeline: int) -> None:
    """End this process when the parent process ends, even during a computation.

    A thread waits for the end of a pipe. On Linux the kernel also kills this process, which ends a
    stopped process too.

    Args:
        parent: process id of the parent.
        lifeline: the reading end of a pipe whose other end the parent keeps open.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()


def _watch(lifeline: int) -> None:
    # Nobody writes to the pipe: it becomes readable when the parent ends.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.poll()
    os._exit(1)


def describe_exit(code: int) -> str:
    """Describe how a process ended, from the return code as in ``subprocess``."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
