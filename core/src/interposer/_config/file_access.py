"""Safe access to files that other users may have prepared.

Only regular files are read; files of a cache must also belong to this user or root.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from interposer._contract.errors import warn

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
# O_NONBLOCK: do not wait for the other end of a FIFO. O_NOCTTY: do not acquire a terminal.
_SAFE_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


class SharedCacheWarning(UserWarning):
    """Every user of this host can write to a folder of the cache."""


def irregular(path: str | os.PathLike[str]) -> str:
    """Describe why a path leads to no regular file; "" for a regular or a missing file.

    FIFOs and devices are never opened, because a read may never end. Links are followed, because
    downloaded models consist of links.
    """
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        return ""
    except OSError as error:  # for example a link to itself
        return f"cannot be read: {error.strerror}"
    return "" if kind == stat.S_IFREG else f"is {_KINDS.get(kind, 'no file')}, not a regular file"


def open_owned(path: Path, *, writes: bool = False) -> int:
    """Open a regular file that this user or root owns, without following links.

    Args:
        writes: open for reading and writing, and create a missing file.
    Returns: the file descriptor.
    Raises: OSError: the text names the problem.
    """
    check_folders(path)
    with suppress(FileNotFoundError, ValueError):
        if stat.S_ISLNK(path.lstat().st_mode):  # the error of O_NOFOLLOW would name a loop
            raise PermissionError(f"{path} is a symbolic link, which the cache does not follow")
    access = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
    descriptor = os.open(path, access | _SAFE_FLAGS, 0o644)
    try:
        status = os.fstat(descriptor)
        kind = stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFREG:
            raise PermissionError(f"{path} is {_KINDS.get(kind, 'no file')}, not a regular file")
        if not _is_trusted(status.st_uid):
            raise PermissionError(
                f"{path} belongs to user {status.st_uid}, not to this one or root"
            )
        # Another name may be a hard link that another user planted.
        if writes and status.st_nlink > 1:
            raise PermissionError(
                f"{path} has {status.st_nlink} hard links; writing would change the other file"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_folders(path: Path) -> None:
    """Refuse a path whose folder or grandparent folder is a link that another user made.

    Raises: OSError: the text names the link.
    """
    for folder in path.parents[:2]:
        try:
            status = folder.lstat()
        except (OSError, ValueError):
            continue  # opening the file gives a better error
        if stat.S_ISLNK(status.st_mode) and not _is_trusted(status.st_uid):
            raise PermissionError(
                f"{folder} is a symbolic link of user {status.st_uid}, not of this one or root"
            )


def warn_if_shared(folder: Path) -> None:
    """Warn once if every user of the host can write to a folder of the cache."""
    with suppress(OSError):
        if hasattr(os, "getuid") and folder.stat().st_mode & stat.S_IWOTH:
            _warn_of(folder)


@cache
def _warn_of(folder: Path) -> None:
    warn(
        f"Every user of this host can write to {folder}. Files of other users are refused there. "
        f"Try: chmod o-w {folder}, or set INTERPOSER_CACHE_DIR to a folder of your own",
        SharedCacheWarning,
    )


def _is_trusted(user: int) -> bool:
    # A system without user ids has a single user.
    return not hasattr(os, "getuid") or user in (os.getuid(), 0)
