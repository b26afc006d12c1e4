"""A limit of memory for what a process takes from now on, by a control group below its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """Limit what this process takes within a block; memory that it has is counted before.

    The group lies below that of the process, so that whatever limits this still does. It goes when
    the block ends.

    Raises: OSError: this process may make no groups.
    """
    own, limit = _own_group()
    group = own / f"interposer-limit-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(num_bytes), encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        try:
            yield group
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    finally:
        for _ in range(250):
            with suppress(OSError):  # until the kernel has counted what was freed
                group.rmdir()
                break
            time.sleep(0.02)


def _own_group() -> tuple[Path, str]:
    """Return the group of this process that counts memory, and its file with the limit."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    path = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition(":")[2].strip()
    return _GROUPS / path.lstrip("/"), "memory.max"
