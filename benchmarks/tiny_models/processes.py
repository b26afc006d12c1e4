"""Verdicts in processes of their own, so that a crash is a row and not the end."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal

import torch

from tiny_models.judge import Adapt, Row, judge

# Of processor time, which another load of the machine does not lengthen; and of waiting.
CPU_SECONDS, SECONDS = 60, 600


def judge_apart(
    model_type: str, class_name: str, adapt: Adapt, dtype: torch.dtype = torch.float32
) -> Row:
    """Return the row of an architecture, which a fork of this process judges."""
    gc.freeze()  # the collector would write to every page that the fork shares
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _answer(write, model_type, class_name, adapt, dtype)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Row(**json.loads(text))
    row = Row(model_type, class_name, str(dtype).removeprefix("torch."), status="crashed")
    row.reason = f"exit status {os.waitstatus_to_exitcode(status)}"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        row.reason = signal.Signals(number).name
        if number in (signal.SIGXCPU, signal.SIGALRM):
            row.status = "timed out"
    return row


def _answer(write: int, model_type: str, class_name: str, adapt: Adapt, dtype: torch.dtype) -> None:
    """Write the row into a pipe, and end this process."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS)
        # Threads of OpenMP that the parent had are not in this fork, and would be waited for.
        torch.set_num_threads(1)
        row = judge(model_type, class_name, adapt, dtype)
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            json.dump(row.as_dict(), pipe)
        status = 0
    finally:
        os._exit(status)
