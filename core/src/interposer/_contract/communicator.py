"""The communicator contract: collectives over the processes that compute one model together.

Dimensions: N ranks, T rows.
"""

from __future__ import annotations

import json
import platform as machine
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from interposer._contract.errors import MissingMemberError
from interposer._contract.gathering import gather_bytes

if TYPE_CHECKING:
    from interposer._contract.platform import Platform

HOST_BACKEND = "gloo"
"""The backend of torch.distributed for the host's memory, which every torch has."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that compute one model together, as one of them sees them.

    Attributes:
        rank: of this process, from 0.
        size: the number of processes, N.
        hosts: the machine of each rank, as a number from 0 in the order of appearance.
        platforms: the name of the platform of each rank.
        group: of torch.distributed, over the host's memory; None where ranks are only described.
        timeout_seconds: within which every rank comes to a collective; else it is lost.
        backend: of torch.distributed for the devices' memory; that of the host's memory where the
            ranks are of several platforms, or theirs has none.
        experts: how experts are placed whole on ranks, as their layers take it; None where each
            rank has a share of every expert.
        secret: signs what ranks exchange by ``gather``; empty where nobody gave them one.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    platforms: tuple[str, ...]
    group: Any = None
    timeout_seconds: float = 60.0
    backend: str = HOST_BACKEND
    experts: Any = None
    secret: bytes = field(default=b"", repr=False, compare=False)

    @classmethod
    def of(
        cls, group: Any, platform: Platform, timeout_seconds: float = 60.0, secret: bytes = b""
    ) -> Ranks:
        """Return the ranks of a process group; every rank of it calls this at the same time.

        Args:
            group: of torch.distributed, over the host's memory.
            platform: of this rank.
            secret: that these ranks alone know.
        """
        import torch.distributed as dist

        backend = HOST_BACKEND
        if platform.provides("distributed_backend"):
            backend = platform.distributed_backend()
        # Containers of one machine have one boot id, and mostly no memory in common.
        host = f"{machine.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"
        found = _gathered_values([host, platform.name, backend], group, secret)
        hosts, platforms, backends = zip(*found, strict=True)
        return cls(
            rank=dist.get_rank(group),
            size=len(found),
            hosts=tuple(list(dict.fromkeys(hosts)).index(host) for host in hosts),
            platforms=platforms,
            group=group,
            timeout_seconds=timeout_seconds,
            backend=backend if len({*zip(platforms, backends, strict=True)}) == 1 else HOST_BACKEND,
            secret=secret,
        )

    def gather(self, value: Any) -> list[Any]:
        """Return the plain value of every rank, in order; every rank calls this at the same time.

        Args:
            value: texts, numbers, None, and lists and dicts by text of them.
        Raises:
            RankError: another process wrote a message.
            RuntimeError: a rank is lost, as torch.distributed says it.
        """
        return _gathered_values(value, self.group, self.secret)

    def dims(self, num_bytes: int) -> dict[str, int | float | str | bool]:
        """Return what a request for a collective states; ``num_bytes`` are those of one rank."""
        return {
            "ranks": self.size,
            "hosts": len(set(self.hosts)),
            "platforms": len(set(self.platforms)),
            "bytes": num_bytes,
        }


class Communicator(ABC):
    """Collectives over ranks, which every rank calls in the same order with equal dtypes.

    Sums are taken in float32 or wider, or rounded to the dtype after each of N - 1 additions; every
    rank gets the same bits. A call that a rank does not come to within ``ranks.timeout_seconds``
    raises ``RankError`` on the others, and so does each later one.

    A subclass has the methods that its record names in ``collectives``; the others raise. It meets
    the other ranks by ``open``, or at its first collective, not when it is made: each rank plans
    for itself, and may fail alone.

    Args:
        ranks: with a group.
        device: of this rank, as torch names it.
    """

    in_place: ClassVar[bool] = False
    """``all_reduce`` returns the tensor that it was given, with the sum in it."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        self.ranks = ranks
        self.device = device

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: a copy of a layer calls the same ranks."""
        return self

    def open(self) -> None:  # noqa: B027 what shares nothing has nothing to do
        """Meet the other ranks, which all call this at the same time; by default, do nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks, of its shape; ``x`` may be overwritten."""
        raise self._missing("all_reduce")

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the op ``fused_add_rms_norm`` of the sum of ``x``, which may be overwritten.

        Args:
            x: ``[T, H]``.
            residual: ``[T, H]``, equal on all ranks, in the dtype of ``x`` or float32.
            weight: ``[H]``.
        """
        raise self._missing("all_reduce_add_rms_norm")

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in their order, ``[sum(sizes), ...]``.

        Args:
            x: ``[sizes[rank], ...]``.
            sizes: rows of each rank; some may be 0.
        """
        raise self._missing("all_gather")

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum of ``x`` over the ranks, ``[sizes[rank], ...]``.

        Args:
            x: ``[sum(sizes), ...]``.
            sizes: rows that each rank gets; some may be 0.
        """
        raise self._missing("reduce_scatter")

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that the ranks have for this one, in their order.

        Args:
            x: ``[sum(sent), ...]``, the rows for each rank in their order.
            sent: rows for each rank.
            received: rows of each rank, ``sent[rank]`` there.
        """
        raise self._missing("all_to_all")

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return what ``x`` of the rank ``source`` holds, written to ``x`` of the others."""
        raise self._missing("broadcast")

    @abstractmethod
    def close(self) -> None:
        """Give back what the ranks share; doing so twice does nothing."""

    def _missing(self, collective: str) -> MissingMemberError:
        return MissingMemberError(
            f"{type(self).__name__} has no {collective!r}. Its record names what it has in "
            "collectives"
        )


def _gathered_values(value: Any, group: Any, secret: bytes) -> list[Any]:
    messages = gather_bytes(json.dumps(value).encode(), group, secret)
    return [json.loads(message) for message in messages]
