"""Binding of this process's threads to processors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from interposer import Verdict


def bind_process(processors: Iterable[int]) -> Verdict:
    """Bind every thread of this process to ``processors``; on refusal, change no binding.

    A later thread inherits the binding of the thread that starts it.
    """
    requested = set(processors)
    if not requested:
        return Verdict.refuse("no processors were given")
    if not hasattr(os, "sched_setaffinity"):
        return Verdict.refuse("this operating system cannot bind threads to processors")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, requested)
    except (OSError, ValueError, OverflowError) as error:
        return Verdict.refuse(f"the system denies processors {sorted(requested)}: {error}")
    granted = os.sched_getaffinity(0)
    if granted != requested:  # the kernel silently drops processors outside the process's cpuset
        os.sched_setaffinity(0, before)
        denied = sorted(requested - granted)
        return Verdict.refuse(f"processors {denied} do not exist or are denied to this process")
    # sched_setaffinity(0) above has bound the calling thread only.
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # the thread ended after it was listed
            os.sched_setaffinity(int(thread.name), requested)
    return Verdict.accept(f"bound to processors {sorted(requested)}")
