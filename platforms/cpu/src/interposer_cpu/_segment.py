"""Shared memory of the ranks on one host: a mapped file, unlinked once every rank has mapped it."""

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
"""Descriptor, path by which other processes open the file, and whether to delete the path."""


def join_ranks(ranks: Ranks) -> int:
    """Map memory shared by all ranks, and return the address of the library's communicator.

    A collective call: every rank makes it at the same time. Rank 0 creates the file and deletes
    its name after all ranks have mapped the file. The first place that every rank can map is used.

    Raises:
        ConfigError: the ranks can share memory in none of the places.
        RankError: a rank was lost.
    """
    native = library()
    num_bytes = native.shared_bytes(ranks.size)
    failures = list[str]()
    for place, create in _PLACES.items():
        with _offer_file(ranks, create, num_bytes) as (path, token, reason):
            address = 0
            if path and not reason:
                try:
                    address = _map_file(ranks, path, token)
                except OSError as error:
                    reason = f"rank {ranks.rank}: {error}"
            reasons = [text for text in _gather_reasons(ranks, reason) if text]
        # All ranks have gathered the same reasons, and so take the same branch.
        if not reasons:
            native.ranks_joined(address)
            return address
        if address:
            native.leave_ranks(address)
        failures.append(f"  {place}: {reasons[0]}")
    raise ConfigError(
        f"The {ranks.size} ranks of this host share no memory of {num_bytes >> 20} MiB.\n"
        + "\n".join(failures)
        + "\nTry: a larger /dev/shm (docker run --shm-size=1g), or "
        'Config(communicators={"*": "torch"})'
    )


@contextmanager
def _offer_file(
    ranks: Ranks, create: Callable[[int], File], num_bytes: int
) -> Iterator[tuple[str, int, str]]:
    """Create a file on rank 0, send the path to all ranks, and unlink the file after the block.

    The file begins with a random token. A rank checks the token, because the same path may name
    another file in the rank's container.

    Yields: path, token, and the reason if rank 0 could not create the file.
    """
    offer = ("", 0, "")
    file: File | None = None
    if ranks.rank == 0:
        try:
            file = create(num_bytes)
            # The library checks the token after mapping.
            token = secrets.randbits(_TOKEN_BITS)
            os.pwrite(file[0], token.to_bytes(8, sys.byteorder), 0)
            offer = (file[1], token, "")
        except OSError as error:
            offer = ("", 0, str(error))
    try:
        with _missing_rank_raises(ranks):
            path, token, reason = ranks.gather(offer)[0]
        yield path, token, reason
    finally:
        if file is not None:
            os.close(file[0])
            if file[2]:
                with suppress(FileNotFoundError):
                    Path(file[1]).unlink()


def _map_file(ranks: Ranks, path: str, token: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        milliseconds = int(ranks.timeout_seconds * 1000)
        return int(library().join_ranks(file, ranks.rank, ranks.size, token, milliseconds))
    finally:
        os.close(file)


def _gather_reasons(ranks: Ranks, reason: str) -> list[str]:
    """Gather the reasons why ranks could not map the file; wait until every rank has tried."""
    with _missing_rank_raises(ranks):
        return ranks.gather(reason)


@contextmanager
def _missing_rank_raises(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # raised by the backend of torch.distributed
        message = str(error).partition("\n")[0]
        reason = (
            f"a rank did not come to the start of shared memory. torch.distributed says: {message}"
        )
        raise RankError(ranks.rank, reason) from error


def _create_anonymous(num_bytes: int) -> File:
    """Create a file without a name, which the system frees even if all processes crash."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    # Other processes of the same user open the descriptor through /proc.
    file = os.memfd_create("interposer-ranks")
    return _reserve(file, f"/proc/{os.getpid()}/fd/{file}", num_bytes, has_name=False)


def _create_in_shared_memory(num_bytes: int) -> File:
    file, path = tempfile.mkstemp(prefix="interposer-", dir=_SHARED)
    return _reserve(file, path, num_bytes, has_name=True)


def _create_in_temporary_folder(num_bytes: int) -> File:
    file, path = tempfile.mkstemp(prefix="interposer-")
    return _reserve(file, path, num_bytes, has_name=True)


def _reserve(file: int, path: str, num_bytes: int, *, has_name: bool) -> File:
    """Reserve memory for a file, so that a write cannot kill the process when memory is short."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.truncate(file, num_bytes)
    except OSError:
        os.close(file)
        if has_name:
            Path(path).unlink()
        raise
    return file, path, has_name


_PLACES: dict[str, Callable[[int], File]] = {
    "a file without a name": _create_anonymous,
    "/dev/shm": _create_in_shared_memory,
    "the temporary folder": _create_in_temporary_folder,
}
