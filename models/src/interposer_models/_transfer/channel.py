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

FORMAT = "interposer-weights-1"
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
        group: distributed.ProcessGroup | None,
        source: int | None,
        timeout_seconds: float,
        bucket_bytes: int = 0,
    ) -> None:
        """Look at the group; nothing is sent.

        Args:
            source: None for this process.
        Raises: ConfigError: there is no such group, or nobody else is in it.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "Weights are sent over a process group, and this process is in none. "
                "Try: torch.distributed.init_process_group"
            )
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0 or self.size < 2:
            has = "does not contain this process" if self.rank < 0 else "has no other process"
            raise ConfigError(f"The process group {has}. Try: a group of trainer and receivers")
        self.source = self.rank if source is None else source
        if source is not None and (source == self.rank or not 0 <= source < self.size):
            raise ConfigError(
                f"source is {source}, and this process is rank {self.rank} of {self.size}. "
                "Try: the rank of the trainer in the group"
            )
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.device = device_of(distributed.get_backend_config(group))
        self._timeout = timedelta(seconds=timeout_seconds)

    def post(self, tensor: torch.Tensor) -> Posted:
        """Begin to broadcast a tensor of the source into those of the other ranks."""
        with self._told():
            work: Any = distributed.broadcast(
                tensor, group_src=self.source, group=self.group, async_op=True
            )
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
            work: Any = distributed.all_gather(votes, own, group=self.group, async_op=True)
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

    def _wait(self, work: Any) -> None:
        with self._told():
            if not work.wait(self._timeout):
                raise RuntimeError("it did not end")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch, whatever the backend
            limit = self._timeout.total_seconds()
            raise RankError(
                self.rank,
                f"The exchange of weights with {self.size - 1} other ranks ended, for one of them "
                f"died or did not answer for {limit:g} s ({str(error).splitlines()[0]:.300}). "
                "Try: see why, and make a new process group",
            ) from error


def device_of(config: str) -> torch.device:
    """Return where tensors lie that a group sends.

    Args:
        config: its devices and backends, such as ``"cpu:gloo,acme:accl"``. A backend that is made
            for an accelerator is preferred.
    """
    pairs = [pair.partition(":") for pair in config.lower().split(",")]
    own = [device for device, _, backend in pairs if device != "cpu" and backend != "gloo"]
    return torch.device(own[0] if own else "cpu")


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(_VOTE_BYTES).encode()), dtype=torch.uint8)
