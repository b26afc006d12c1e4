"""A child process that runs trials and sends the outcomes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

import torch

from interposer.tooling import child_environment

_PROGRAM = "from interposer_testing._trials.shard import main; main()"
# A crash is described at the end of the output.
_MAX_ERROR_CHARACTERS = 4000


class Child:
    """A child process that runs trials; a timer kills the process if a trial takes too long.

    Attributes:
        end: how the process ended, such as "was killed by SIGSEGV".
        stderr: the last characters of the standard error.
    """

    def __init__(self, request: dict[str, Any], limit_seconds: float) -> None:
        self._request = json.dumps(request)
        self._parts = request["parts"]
        self._limit_seconds = limit_seconds
        self._hung = False
        self.end = self.stderr = ""

    def __enter__(self) -> Child:
        self._open = ExitStack()
        self._errors = self._open.enter_context(TemporaryFile("w+", errors="replace"))
        self._process = self._open.enter_context(
            subprocess.Popen(
                # faulthandler prints the frames of a crash, which name the trial.
                [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, self._request],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=_environment(self._parts),
            )
        )
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()  # has no effect unless the caller stopped early
        self.end = self._describe_end(self._process.wait())
        self._errors.seek(0)
        self.stderr = self._errors.read()[-_MAX_ERROR_CHARACTERS:]
        self._open.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the process until the process ends."""
        assert self._process.stdout is not None
        while True:
            watch = Timer(self._limit_seconds, self._hang)
            watch.start()
            line = self._process.stdout.readline()
            watch.cancel()
            if not line.endswith("\n"):  # the process died while it wrote, or closed the pipe
                self._process.wait()
                return
            yield json.loads(line)

    def _describe_end(self, code: int) -> str:
        if self._hung:
            return f"took more than {self._limit_seconds:g} s, and was ended"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"left with exit code {code}"

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _hang(self) -> None:
        self._hung = True
        self.stop()


def _environment(parts: int) -> dict[str, str]:
    """Return the environment of a child, which divides the cores among all children.

    A child has at least two threads, so that races between threads of a kernel can still occur.
    """
    if parts == 1:
        return child_environment()
    threads = max(2, torch.get_num_threads() // parts)
    return child_environment(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
