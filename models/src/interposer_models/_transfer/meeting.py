"""A group of a trainer and receivers that are in no process group of their programs."""

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
    """A group of processes that come to an address, for ``send_weights`` and ``WeightsFrom``.

    It exists beside the process groups of a program, and lasts as long as its processes do: later
    exchanges use it again. It sends with gloo, from the host's memory.

    Attributes:
        address: ``"tcp://host:port"`` of the process with rank 0, or ``"file:///path"`` of a file
            that does not exist yet and that all can write.
        rank: of this process. Where a model has several ranks, that of its rank 0; those of the
            others follow.
        size: how many processes come.
    """

    address: str
    rank: int
    size: int


def linked(meeting: Meeting, timeout_seconds: float) -> Link:
    """Return the connections to the others, once all have come.

    Raises:
        ConfigError: there is no such rank, or the address is none.
        RankError: they did not come in time.
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
    if meeting not in _MET:
        _MET[meeting] = _Met(meeting, timedelta(seconds=timeout_seconds))
    return _MET[meeting]


class _Met:
    """The connections of one process at a meeting."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, timeout: timedelta) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._meeting = meeting
        try:
            found = rendezvous(meeting.address, self.rank, self.size, timeout=timeout)
            store, *_ = next(iter(found))
            store.set_timeout(timeout)
            self._store = store  # which rank 0 serves to the others
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

    def gather(self, found: list[torch.Tensor], own: torch.Tensor) -> Work:
        return self._group.allgather(found, own)  # type: ignore[no-any-return]

    def break_up(self) -> None:
        _MET.pop(self._meeting, None)


_MET: dict[Meeting, _Met] = {}
# Ends the threads of gloo. One that frees the last tensors while Python ends aborts the process.
atexit.register(_MET.clear)
