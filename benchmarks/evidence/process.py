"""A program that is given a limit, and is ended with all that it started when it passes it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "run"]

_LAST_WORDS_S = 3.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program: its exit status, None if it was killed, and the seconds it took."""

    status: int | None
    seconds: float


def run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float
) -> Ended:
    """Run ``command`` with its output in ``log``; after ``limit_s`` it is aborted, then killed.

    Python under ``-X faulthandler`` writes where it was when it is aborted.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            _await(process, _LAST_WORDS_S)
        finally:
            # Whatever it started goes too, and frees the memory of the device.
            _kill_group(process.pid)
            process.wait()
    return Ended(status, time.monotonic() - start)


def _await(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
