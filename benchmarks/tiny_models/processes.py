"""Calls in processes of their own, so that a crash is a row of a table and not its end."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import torch

# Of processor time, which another load of the machine does not lengthen; and of waiting.
CPU_SECONDS, SECONDS = 60, 600


def called_apart(judged: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a call in a fork, or ``status`` and ``reason`` if the fork died."""
    gc.freeze()  # the collector would write to every page that the fork shares
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _answer(write, judged)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        row: dict[str, Any] = json.loads(text)
        return row
    if not os.WIFSIGNALED(status):
        return {"status": "crashed", "reason": f"exit status {os.waitstatus_to_exitcode(status)}"}
    number = os.WTERMSIG(status)
    timed_out = number in (signal.SIGXCPU, signal.SIGALRM)
    return {
        "status": "timed out" if timed_out else "crashed",
        "reason": signal.Signals(number).name,
    }


def _answer(write: int, judged: Callable[[], dict[str, Any]]) -> None:
    """Write the result into a pipe, and end this process."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS)
        # Threads of OpenMP that the parent had are not in this fork, and would be waited for.
        torch.set_num_threads(1)
        row = judged()
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            json.dump(row, pipe)
        status = 0
    finally:
        os._exit(status)
