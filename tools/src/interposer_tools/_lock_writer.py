"""The lock file of what is installed: made, and written in one step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from interposer.errors import LockError, StorageError
from interposer.tooling import Lock, checksum, lock_error, unlockable, write_text

if TYPE_CHECKING:
    from interposer.tooling import Distribution


def lock_of(distributions: Iterable[Distribution]) -> Lock:
    """Return the lock of what is installed.

    Raises: LockError: the metadata of one is unusable, its files were altered, or another
        has its name.
    """
    distributions = [*dict.fromkeys(distributions)]
    for found in distributions:
        if found.problem:
            raise LockError(
                f"What is installed in {found.location} cannot be locked: {found.problem}.\n"
                "Try: uninstall it, then interposer lock"
            )
    problems = [*unlockable(distributions)]
    if problems:
        raise lock_error("What is installed cannot be locked.", problems)
    return Lock.of(distributions)


def write_lock(lock: Lock, path: Path) -> None:
    """Replace the lock file ``path`` in one step; its entries are sorted by name.

    Raises: LockError: it cannot be written.
    """
    fields = lock.model_dump(mode="json")
    fields["distributions"].sort(key=lambda entry: entry["name"])
    fields["checksum"] = checksum(fields)
    try:
        write_text(path, json.dumps(fields, indent=2) + "\n")
    except StorageError as error:
        raise LockError(str(error)) from error
