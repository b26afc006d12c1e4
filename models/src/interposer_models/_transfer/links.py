"""Connections between a trainer and receivers, over a process group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from interposer.errors import ConfigError


class Work(Protocol):
    """A collective that has been started."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until the collective has ended; raise RuntimeError if it failed."""
        ...


class Link(Protocol):
    """Collectives among the processes of one weight transfer.

    Attributes:
        device: device of the transferred tensors: the host if the group uses gloo for the host.
    """

    rank: int
    size: int
    device: torch.device

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start to broadcast a tensor of rank ``source`` into the tensors of the other ranks."""
        ...

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Start an all-gather of ``tensor`` into ``gathered``, one tensor for each rank."""
        ...

    def break_up(self) -> None:
        """Mark the connections as unusable after a failure."""
        ...


class GroupLink:
    """Connections over a process group; None is the default group."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Use a process group that the program has created.

        Raises: ConfigError: the program has no process group.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "Weights are sent over a process group, and this process is in none. "
                "Try: torch.distributed.init_process_group, or a Meeting as group"
            )
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        # A process outside of the group has no backend.
        self.device = device_of(distributed.get_backend_config(group)) if self.rank >= 0 else _HOST
        self._group = group

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        work: Any = distributed.broadcast(
            tensor, group_src=source, group=self._group, async_op=True
        )
        return work  # type: ignore[no-any-return]

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        work: Any = distributed.all_gather(gathered, tensor, group=self._group, async_op=True)
        return work  # type: ignore[no-any-return]

    def break_up(self) -> None:
        """Do nothing: the program owns the group."""


_HOST = torch.device("cpu")


def device_of(config: str) -> torch.device:
    """Return the device of the tensors that a process group can transfer.

    Args:
        config: devices and backends of the group, such as ``"cpu:gloo,acme:accl"``. A backend of an
            accelerator is preferred.
    """
    pairs = [pair.partition(":") for pair in config.lower().split(",")]
    accelerators = [device for device, _, backend in pairs if device != "cpu" and backend != "gloo"]
    return torch.device(accelerators[0] if accelerators else "cpu")
