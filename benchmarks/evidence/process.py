"""A program that is given a limit, and is ended with all that it started when it passes it."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "run", "run_forked"]

_LAST_WORDS_S = 3.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program.

    Attributes:
        status: with which it ended, None if it was killed.
        seconds: from its start to its end.
        processor_s: of all processors, what it started included.
    """

    status: int | None
    seconds: float
    processor_s: float = 0.0


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run ``command`` with its output in ``log``; after ``limit_s`` it is aborted, then killed.

    Python under ``-X faulthandler`` writes where it was when it is aborted.
    """
    start, before = time.monotonic(), _processor_s()
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
    return Ended(status, time.monotonic() - start, _processor_s() - before)


def run_forked(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float
) -> Ended:
    """Run a Python program as ``run`` does, in a fork of this process with all that it imported."""
    start, before = time.monotonic(), _processor_s()
    child = os.fork()
    if not child:
        _become(arguments, environment, log)
    status: int | None = None
    while time.monotonic() - start < limit_s:
        ended, waited = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(waited)
            break
        time.sleep(_LOOK_S)
    _kill_group(child)
    if status is None:
        os.waitpid(child, 0)
    return Ended(status, time.monotonic() - start, _processor_s() - before)


def _become(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run the program in this process, which ends with it."""
    status = 1
    try:
        os.setsid()
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(environment)
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the program's, told as Python would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _processor_s() -> float:
    """Return the seconds of processors that ended children took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
