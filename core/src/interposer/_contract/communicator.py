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
"""The torch.distributed backend for host memory, which every torch build has."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that compute one model together, as seen by one of them.

    Attributes:
        rank: index of this process, from 0.
        size: the number of processes, N.
        hosts: the machine of each rank, numbered from 0 in order of first appearance.
        platforms: the platform name of each rank.
        group: process group of torch.distributed over host memory; None if the ranks are only
            described.
        timeout_seconds: time within which every rank must join a collective; a rank that does not
            is lost.
        backend: torch.distributed backend for device memory; the host-memory backend if platforms
            differ, or the platform has no backend.
        experts: expert parallelism, in the form that the experts' layers take; None if every rank
            holds a shard of every expert.
        secret: signs the messages of ``gather``; empty if the launch has none.
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
        """Collect the facts of a process group; every rank must call this at the same time.

        Args:
            group: process group of torch.distributed over host memory.
            platform: of this rank.
            secret: known only to the ranks of this group.
        """
        import torch.distributed as dist

        backend = HOST_BACKEND
        if platform.provides("distributed_backend"):
            backend = platform.distributed_backend()
        # Containers on one machine share the boot id but usually no memory, so the host name
        # distinguishes them.
        host = f"{machine.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"
        rank_facts = _gathered_values([host, platform.name, backend], group, secret)
        hosts, platforms, backends = zip(*rank_facts, strict=True)
        return cls(
            rank=dist.get_rank(group),
            size=len(rank_facts),
            # Numbers in order of first appearance, equal on every rank.
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
            value: strings, numbers, None, and lists and string-keyed dicts of them.
        Raises:
            RankError: a message was written by another process.
            RuntimeError: a rank is lost, as reported by torch.distributed.
        """
        return _gathered_values(value, self.group, self.secret)

    def dims(self, num_bytes: int) -> dict[str, int | float | str | bool]:
        """Return the dims of a request for a collective; ``num_bytes`` is the size on one rank."""
        return {
            "ranks": self.size,
            "hosts": len(set(self.hosts)),
            "platforms": len(set(self.platforms)),
            "bytes": num_bytes,
        }


class Communicator(ABC):
    """Collectives over ranks, which every rank must call in the same order with equal dtypes.

    Sums are computed in float32 or wider, or rounded to the dtype after each of N - 1 additions;
    every rank gets the same bits. If a rank does not join a call within ``ranks.timeout_seconds``,
    the call raises ``RankError`` on the other ranks, and so does every later call.

    A subclass implements the methods that the record names in ``collectives``; the others raise.
    Ranks connect in ``open`` or at the first collective, not in the constructor, because each rank
    plans independently and may fail alone.

    Args:
        ranks: with a group.
        device: of this rank, as torch names it.
    """

    in_place: ClassVar[bool] = False
    """``all_reduce`` writes the sum to its argument and returns that tensor."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        self.ranks = ranks
        self.device = device

    def __deepcopy__(self, memo: object) -> Self:
        """Return this object: a copy of a layer calls the same ranks."""
        return self

    def open(self) -> None:  # noqa: B027 optional: some communicators share nothing
        """Connect to the other ranks, which all call this at the same time; a no-op by default."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks, same shape; ``x`` may be overwritten."""
        raise self._missing("all_reduce")

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Apply the op ``fused_add_rms_norm`` to the sum of ``x``, which may be overwritten.

        Args:
            x: ``[T, H]``.
            residual: ``[T, H]``, equal on all ranks, in the dtype of ``x`` or float32.
            weight: ``[H]``.
        """
        raise self._missing("all_reduce_add_rms_norm")

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the rows of all ranks in order, ``[sum(sizes), ...]``.

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
        """Send rows to every rank, and return the rows that every rank sent here, in rank order.

        Args:
            x: ``[sum(sent), ...]``, the rows for each rank in rank order.
            sent: number of rows for each rank.
            received: number of rows from each rank, equal to ``sent[rank]`` there.
        """
        raise self._missing("all_to_all")

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Copy ``x`` of the rank ``source`` to ``x`` of the other ranks, and return ``x``."""
        raise self._missing("broadcast")

    @abstractmethod
    def close(self) -> None:
        """Release the communicator's shared resources; a second call does nothing."""

    def _missing(self, collective: str) -> MissingMemberError:
        return MissingMemberError(
            f"{type(self).__name__} has no {collective!r}. Its record lists the available methods "
            "in collectives"
        )


def _gathered_values(value: Any, group: Any, secret: bytes) -> list[Any]:
    messages = gather_bytes(json.dumps(value).encode(), group, secret)
    return [json.loads(message) for message in messages]
