"""Weight transfers between processes without a common process group."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from interposer.errors import ConfigError, RankError
from interposer_models._transfer.links import Link, Work


@dataclass(frozen=True, slots=True)
class Meeting:
    """An address at which a trainer and receivers connect, to transfer weights.

    Pass the meeting as ``group`` to ``send_weights`` and ``WeightsFrom``. Its connections are
    separate from the process groups of the program, are reused by later transfers, and last until
    the process ends. Tensors are sent with gloo, from host memory.

    Attributes:
        address: ``"tcp://host:port"`` of the process with rank 0, or ``"file:///path"`` of a file
            that does not exist yet and that all processes can write.
        rank: rank of this process. For a model on several ranks, the rank of its rank 0; its other
            ranks have the following numbers.
        size: number of processes.
    """

    address: str
    rank: int
    size: int


def linked(meeting: Meeting, timeout_seconds: float) -> Link:
    """Return the connections of a meeting, after waiting for all processes.

    Raises:
        ConfigError: the rank or the address is invalid.
        RankError: the other processes did not connect in time.
    """
    if not 0 <= meeting.rank < meeting.size:
        raise ConfigError(
            f"The rank of this process at {meeting.address} is {meeting.rank}, and {meeting.size} "
            f"processes come. Try: a rank from 0 to {meeting.size - 1}, of a model that of its "
            "first rank"
        )
    if not meeting.address.startswith(("tcp://", "file://")):
        raise ConfigError(
            f"{meeting.address!r} is no address to meet at. "
            "Try: 'tcp://host:port' or 'file:///path'"
        )
    # Later transfers of the process reuse the connections: an address can be used only once.
    if meeting not in _LINKS:
        _LINKS[meeting] = _MeetingLink(meeting, timedelta(seconds=timeout_seconds))
    return _LINKS[meeting]


class _MeetingLink:
    """The connections of this process at a meeting."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, timeout: timedelta) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._meeting = meeting
        try:
            rendezvous_results = rendezvous(meeting.address, self.rank, self.size, timeout=timeout)
            store, *_ = next(iter(rendezvous_results))
            store.set_timeout(timeout)
            self._store = store  # keep alive: rank 0 serves the store to the other ranks
            self._group: Any = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)
        except (RuntimeError, ValueError, OSError) as error:  # of torch
            reason = str(error).splitlines()[0]
            raise RankError(
                self.rank,
                f"{self.size} processes did not come to {meeting.address} within "
                f"{timeout.total_seconds():g} s ({reason:.300}). Try: see which one is missing; an "
                "address that was not used before",
            ) from error

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._group.broadcast(tensor, source)  # type: ignore[no-any-return]

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._group.allgather(gathered, tensor)  # type: ignore[no-any-return]

    def break_up(self) -> None:
        _LINKS.pop(self._meeting, None)


_LINKS: dict[Meeting, _MeetingLink] = {}
# Ends the threads of gloo. A thread that frees tensors while Python exits aborts the process.
atexit.register(_LINKS.clear)
