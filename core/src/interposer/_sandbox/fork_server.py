"""The examining process: answers one request at a time, each from a fork of itself.

It runs no plugin's code itself. It ends when nobody is left to ask, or after a minute of silence.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import secrets
import select
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from interposer._contract.errors import FOREIGN_ERRORS
from interposer._sandbox.child import Order, Pipes, become_subject
from interposer._sandbox.supervisor import Ended, Watch
from interposer._sandbox.task import Finding, Task

_IDLE_SECONDS = 60.0
_WARM_SECONDS = 120
# Imported once here instead of in each fork, but only when they are needed.
_TORCH = ("torch", "interposer._contract.layer", "interposer._contract.platform")
# Fake tensors import torch's compiler.
_TORCH_FOR_KERNELS = (*_TORCH, "interposer._sandbox.kernel_comparison", "torch._dynamo")


def main() -> NoReturn:
    """Answer requests on descriptor 0 with lines on descriptor 1 until there are no more."""
    try:
        if os.fork():
            os._exit(0)  # so init reaps the other, who may end when nobody minds it any more
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
        gc.freeze()
        _serve(asking, answering)
    except (Ended, BrokenPipeError):
        os._exit(0)
    finally:
        os._exit(1)


def _serve(asking: int, answering: int) -> None:
    warm = False
    unread = b""
    while True:
        while b"\n" not in unread:
            ready, _, _ = select.select([asking], [], [], _IDLE_SECONDS)
            chunk = os.read(asking, 1 << 16) if ready else b""
            if not chunk:
                raise Ended
            unread += chunk
        line, _, unread = unread.partition(b"\n")
        request = json.loads(line)
        if request["task"]["name"] == "kernel":
            warm = _import(_TORCH_FOR_KERNELS)
        finding = _examine(request, asking, answering, warm)
        if finding is None:
            warm = _import(_TORCH)
            finding = _examine(request, asking, answering, warm)
        answer = {"id": request["id"], "finding": finding and finding.to_json()}
        os.write(answering, json.dumps(answer).encode() + b"\n")


def _examine(request: dict[str, Any], asking: int, answering: int, warm: bool) -> Finding | None:
    """Return what a fork found, or None if it wants torch to be imported first."""
    order = Order(
        Task(**request["task"]),
        request["seconds"],
        request["path"],
        request["cwd"],
        secrets.token_hex(16),
    )
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    pid = os.fork()
    if pid == 0:
        become_subject(order, Pipes(*writers), [asking, answering, *readers], warm)
    for descriptor in writers:
        os.close(descriptor)
    watch = Watch(order, pid, Pipes(*readers))
    try:
        finding = watch.follow(asking, answering)
    finally:
        for descriptor in readers:
            os.close(descriptor)
    return None if watch.wants_torch else finding


def _import(modules: Iterable[str]) -> bool:
    """Import what is trusted, once; a module that fails is met again, and told of, in a fork."""
    if not all(module in sys.modules for module in modules):
        # Whoever hangs here hangs in the process that asks as well.
        signal.alarm(_WARM_SECONDS)
        for module in modules:
            with suppress(*FOREIGN_ERRORS):
                import_module(module)
        signal.alarm(0)
        gc.freeze()
    return True
