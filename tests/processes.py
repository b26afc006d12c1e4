"""Processes that tests start and look at: a server of the command, and whether one lives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(
    command: Sequence[str], ends_by: signal.Signals = signal.SIGTERM
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``interposer serve`` until the block ends, and yield where it serves."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        try:
            while not (found := re.search(r"at (https?://\S+), Ctrl-C ends it", told)):
                line = process.stderr.readline()
                assert line, told
                told += line
            yield found[1], process
        finally:
            process.send_signal(ends_by)
            process.wait(60)


def lives(pid: int) -> bool:
    """Return whether a process is there, and is no zombie; Linux only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def shared_files(*pids: int) -> set[Path]:
    """Return the files of shared memory that processes have mapped.

    Memory without a name, which ends with the processes, is not listed.
    """
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    names = {name for text in maps for name in re.findall(r" (/dev/shm/\S+)$", text, re.MULTILINE)}
    return {Path(name) for name in names}
