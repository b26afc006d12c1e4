"""A process group as a trainer and its receivers use it: broadcasts, and votes of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from interposer.errors import ConfigError, RankError
from interposer_models._transfer.links import GroupLink, Link, Work
from interposer_models._transfer.meeting import Meeting, linked

FORMAT = "interposer-weights-2"
_VOTE_BYTES = 4096
_MOST_REASON = 2000


@dataclass(frozen=True, slots=True)
class Posted:
    """A tensor on its way; it is to be left alone until ``wait``."""

    tensor: torch.Tensor
    wait: Callable[[], None]


class Channel:
    """The group of a trainer, which is the rank ``source`` of it, and of receivers.

    Every call that does not end within ``timeout_seconds`` raises RankError, and so does one in
    which a rank dies. The group is then of no use any more.

    Attributes:
        device: of the tensors that are sent: the host's memory where the group has gloo for it.
        bucket_bytes: of the trainer; known after the first vote.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | Meeting | None,
        source: int | None,
        timeout_seconds: float,
        bucket_bytes: int = 0,
    ) -> None:
        """Look at the group; nothing is sent, but the processes of a meeting come together.

        Args:
            source: None for this process.
        Raises:
            ConfigError: there is no such group, or nobody else is in it.
            RankError: the others did not come to a meeting.
        """
        self._link: Link = (
            linked(group, timeout_seconds) if isinstance(group, Meeting) else GroupLink(group)
        )
        self.rank, self.size = self._link.rank, self._link.size
        if self.rank < 0 or self.size < 2:
            has = "does not contain this process" if self.rank < 0 else "has no other process"
            raise ConfigError(f"The process group {has}. Try: a group of trainer and receivers")
        self.source = self.rank if source is None else source
        if source is not None and (source == self.rank or not 0 <= source < self.size):
            raise ConfigError(
                f"source is {source}, and this process is rank {self.rank} of {self.size}. "
                "Try: the rank of the trainer in the group"
            )
        self.bucket_bytes = bucket_bytes
        self.device = self._link.device
        self._timeout = timedelta(seconds=timeout_seconds)

    def post(self, tensor: torch.Tensor) -> Posted:
        """Begin to broadcast a tensor of the source into those of the other ranks."""
        with self._told():
            work = self._link.broadcast(tensor, self.source)
        return Posted(tensor, lambda: self._wait(work))

    def vote(self, stage: str, refusal: str = "") -> None:
        """Tell all ranks whether this one goes on, and return if all of them do.

        Args:
            stage: of the exchange, the same at all ranks.
            refusal: the reason against it. Then others' reasons are not told.
        Raises: RankError: a rank refuses, or is at another stage.
        """
        facts: dict[str, Any] = {
            "format": FORMAT,
            "stage": stage,
            "source": self.source,
            "bucket_bytes": self.bucket_bytes,
            "refusal": refusal[:_MOST_REASON],
        }
        text = json.dumps(facts)
        while len(text) > _VOTE_BYTES:
            facts["refusal"] = facts["refusal"][: len(facts["refusal"]) // 2]
            text = json.dumps(facts)
        own = _as_tensor(text).to(self.device)
        votes = [torch.empty_like(own) for _ in range(self.size)]
        with self._told():
            work = self._link.gather(votes, own)
        self._wait(work)
        if not refusal:
            self._count([bytes(each.cpu().numpy()) for each in votes], facts)

    def _count(self, votes: list[bytes], own: dict[str, Any]) -> None:
        refusals = []
        for rank, vote in enumerate(votes):
            try:
                said = json.loads(vote)
                different = [key for key in ("format", "stage", "source") if said[key] != own[key]]
                reason = said["refusal"]
                if rank == self.source:
                    self.bucket_bytes = int(said["bucket_bytes"])
            except (ValueError, KeyError, TypeError):
                different, reason = ["message"], ""
                said = {"message": vote[:100]}
            if different:
                told = ", ".join(
                    f"{key} {said[key]!r} in place of {own.get(key)!r}" for key in different
                )
                reason = f"takes part in something else: {told}"
            if reason:
                refusals.append(f"rank {rank}: {reason}")
        if refusals:
            raise RankError(
                self.rank, f"The exchange of weights is refused by {'; by '.join(refusals)}"
            )

    def _wait(self, work: Work) -> None:
        with self._told():
            if not work.wait(self._timeout):
                raise RuntimeError("it did not end")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch, whatever the backend
            self._link.break_up()
            limit = self._timeout.total_seconds()
            raise RankError(
                self.rank,
                f"The exchange of weights with {self.size - 1} other ranks ended, for one of them "
                f"died or did not answer for {limit:g} s ({str(error).splitlines()[0]:.300}). "
                "Try: see why, and make a new process group, or meet at a new address",
            ) from error


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(_VOTE_BYTES).encode()), dtype=torch.uint8)
