"""Broadcasts and votes among a trainer and receivers."""

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
_MAX_REASON_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Posted:
    """A tensor that is being broadcast; the memory is in use until ``wait`` returns."""

    tensor: torch.Tensor
    wait: Callable[[], None]


class Channel:
    """Broadcasts and votes in a group of one trainer, rank ``source``, and receivers.

    A call that does not end within ``timeout_seconds``, or during which a rank dies, raises
    RankError. The group is unusable after that.

    Attributes:
        device: device of the transferred tensors: the host if the group uses gloo for the host.
        bucket_bytes: bucket size of the trainer; known to receivers after the first vote.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | Meeting | None,
        source: int | None,
        timeout_seconds: float,
        bucket_bytes: int = 0,
    ) -> None:
        """Check the group, or wait for the other processes of a meeting; send nothing.

        Args:
            source: rank of the trainer; None if this process is the trainer.
        Raises:
            ConfigError: there is no such group, or no other process is in it.
            RankError: other processes did not connect to a meeting.
        """
        self._link: Link = (
            linked(group, timeout_seconds) if isinstance(group, Meeting) else GroupLink(group)
        )
        self.rank, self.size = self._link.rank, self._link.size
        if self.rank < 0 or self.size < 2:
            fault = "does not contain this process" if self.rank < 0 else "has no other process"
            raise ConfigError(f"The process group {fault}. Try: a group of trainer and receivers")
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
        """Start to broadcast a tensor of the source into the tensors of the other ranks."""
        with self._raise_rank_errors():
            work = self._link.broadcast(tensor, self.source)
        return Posted(tensor, lambda: self._wait(work))

    def vote(self, stage: str, refusal: str = "") -> None:
        """Send this rank's consent or refusal to all ranks, and return if all ranks consent.

        Args:
            stage: stage of the transfer; must be the same on all ranks.
            refusal: why this rank refuses; empty to consent. A refusing rank does not raise for the
                refusals of other ranks.
        Raises: RankError: a rank refuses, or is at another stage.
        """
        facts: dict[str, Any] = {
            "format": FORMAT,
            "stage": stage,
            "source": self.source,
            "bucket_bytes": self.bucket_bytes,
            "refusal": refusal[:_MAX_REASON_CHARACTERS],
        }
        # All votes have one size, as required by an all-gather: shorten a refusal if necessary.
        text = json.dumps(facts)
        while len(text) > _VOTE_BYTES:
            facts["refusal"] = facts["refusal"][: len(facts["refusal"]) // 2]
            text = json.dumps(facts)
        ballot = _as_tensor(text).to(self.device)
        votes = [torch.empty_like(ballot) for _ in range(self.size)]
        with self._raise_rank_errors():
            work = self._link.gather(votes, ballot)
        self._wait(work)
        if not refusal:
            self._count([bytes(vote.cpu().numpy()) for vote in votes], facts)

    def _count(self, votes: list[bytes], facts: dict[str, Any]) -> None:
        """Raise RankError if a rank refuses or votes on another transfer than this rank."""
        refusals = []
        for rank, vote in enumerate(votes):
            try:
                fields = json.loads(vote)
                different = [
                    key for key in ("format", "stage", "source") if fields[key] != facts[key]
                ]
                reason = fields["refusal"]
                if rank == self.source:
                    self.bucket_bytes = int(fields["bucket_bytes"])
            except (ValueError, KeyError, TypeError):
                # Another version, or another use of the group.
                different, reason = ["message"], ""
                fields = {"message": vote[:100]}
            if different:
                differences = ", ".join(
                    f"{key} {fields[key]!r} in place of {facts.get(key)!r}" for key in different
                )
                reason = f"takes part in something else: {differences}"
            if reason:
                refusals.append(f"rank {rank}: {reason}")
        if refusals:
            raise RankError(
                self.rank, f"The exchange of weights is refused by {'; by '.join(refusals)}"
            )

    def _wait(self, work: Work) -> None:
        with self._raise_rank_errors():
            if not work.wait(self._timeout):
                raise RuntimeError("it did not end")

    @contextmanager
    def _raise_rank_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # every backend of torch.distributed raises this type
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
