"""The memory that the ranks of one host share: a file that has no name once all have mapped it."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from interposer import Ranks
from interposer.errors import ConfigError, RankError
from interposer_cpu.native import library

__all__ = ["join_ranks"]

_SHARED = Path("/dev/shm")
_TOKEN_BITS = 62

File = tuple[int, str, bool]
"""A descriptor, the path by which other processes open it, and whether that has to be deleted."""


def join_ranks(ranks: Ranks) -> int:
    """Map memory that all ranks share, and return the address of what the library keeps of it.

    Every rank calls this at the same time. Rank 0 makes the file, and deletes its name when all
    have mapped it. The first of the places is taken that every rank can map.

    Raises:
        ConfigError: there is no such place.
        RankError: a rank was lost meanwhile.
    """
    native = library()
    num_bytes = native.shared_bytes(ranks.size)
    refused = list[str]()
    for where, make in _PLACES.items():
        with _offered(ranks, make, num_bytes) as (path, token, reason):
            address = 0
            if path and not reason:
                try:
                    address = _mapped(ranks, path, token)
                except OSError as error:
                    reason = f"rank {ranks.rank}: {error}"
            reasons = [said for said in _told(ranks, reason) if said]
        if not reasons:
            native.ranks_joined(address)
            return address
        if address:
            native.leave_ranks(address)
        refused.append(f"  {where}: {reasons[0]}")
    raise ConfigError(
        f"The {ranks.size} ranks of this host share no memory of {num_bytes >> 20} MiB.\n"
        + "\n".join(refused)
        + "\nTry: a larger /dev/shm (docker run --shm-size=1g), or "
        'Config(communicators={"*": "torch"})'
    )


@contextmanager
def _offered(
    ranks: Ranks, make: Callable[[int], File], num_bytes: int
) -> Iterator[tuple[str, int, str]]:
    """Tell all ranks of a new file, which has its name for the time of a ``with`` block.

    Yields: path, token, and why there is none.
    """
    offer = ("", 0, "")
    file: File | None = None
    if ranks.rank == 0:
        try:
            file = make(num_bytes)
            token = secrets.randbits(_TOKEN_BITS)
            os.pwrite(file[0], token.to_bytes(8, sys.byteorder), 0)
            offer = (file[1], token, "")
        except OSError as error:
            offer = ("", 0, str(error))
    try:
        with _missing(ranks):
            path, number, reason = ranks.gather(offer)[0]
        yield path, number, reason
    finally:
        if file is not None:
            os.close(file[0])
            if file[2]:
                with suppress(FileNotFoundError):
                    Path(file[1]).unlink()


def _mapped(ranks: Ranks, path: str, token: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        milliseconds = int(ranks.timeout_seconds * 1000)
        return int(library().join_ranks(file, ranks.rank, ranks.size, token, milliseconds))
    finally:
        os.close(file)


def _told(ranks: Ranks, reason: str) -> list[str]:
    """Return the reasons of all ranks, once each has tried to map the file."""
    with _missing(ranks):
        return ranks.gather(reason)


@contextmanager
def _missing(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # that of the backend
        said = str(error).partition("\n")[0]
        reason = (
            f"a rank did not come to the start of shared memory. torch.distributed says: {said}"
        )
        raise RankError(ranks.rank, reason) from error


def _anonymous(num_bytes: int) -> File:
    """Make a file that never has a name: nothing is left of it, whenever its processes end."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    file = os.memfd_create("interposer-ranks")
    return _reserved(file, f"/proc/{os.getpid()}/fd/{file}", num_bytes, named=False)


def _in_shared_memory(num_bytes: int) -> File:
    file, path = tempfile.mkstemp(prefix="interposer-", dir=_SHARED)
    return _reserved(file, path, num_bytes, named=True)


def _in_temporary_folder(num_bytes: int) -> File:
    file, path = tempfile.mkstemp(prefix="interposer-")
    return _reserved(file, path, num_bytes, named=True)


def _reserved(file: int, path: str, num_bytes: int, *, named: bool) -> File:
    """Reserve memory for a file: where there is too little, a process that writes is killed."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.truncate(file, num_bytes)
    except OSError:
        os.close(file)
        if named:
            Path(path).unlink()
        raise
    return file, path, named


_PLACES: dict[str, Callable[[int], File]] = {
    "a file without a name": _anonymous,
    "/dev/shm": _in_shared_memory,
    "the temporary folder": _in_temporary_folder,
}
