"""The connections of a trainer and its receivers, by a process group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from interposer.errors import ConfigError


class Work(Protocol):
    """A collective on its way."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Return once it has ended; raises RuntimeError where it cannot."""
        ...


class Link(Protocol):
    """Collectives of the processes of one exchange.

    Attributes:
        device: of the tensors that are sent: the host's memory where the group has gloo for it.
    """

    rank: int
    size: int
    device: torch.device

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to broadcast a tensor of the source into those of the other ranks."""
        ...

    def gather(self, found: list[torch.Tensor], own: torch.Tensor) -> Work:
        """Begin to exchange tensors of all ranks."""
        ...

    def break_up(self) -> None:
        """Take note that it is of no use any more."""
        ...


class GroupLink:
    """The ranks of a process group; None is the default one."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Look at the group.

        Raises: ConfigError: there is none.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "Weights are sent over a process group, and this process is in none. "
                "Try: torch.distributed.init_process_group, or a Meeting as group"
            )
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.device = device_of(distributed.get_backend_config(group)) if self.rank >= 0 else _HOST
        self._group = group

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        work: Any = distributed.broadcast(
            tensor, group_src=source, group=self._group, async_op=True
        )
        return work  # type: ignore[no-any-return]

    def gather(self, found: list[torch.Tensor], own: torch.Tensor) -> Work:
        work: Any = distributed.all_gather(found, own, group=self._group, async_op=True)
        return work  # type: ignore[no-any-return]

    def break_up(self) -> None:
        """Leave it to whoever made it."""


_HOST = torch.device("cpu")


def device_of(config: str) -> torch.device:
    """Return where tensors lie that a group sends.

    Args:
        config: its devices and backends, such as ``"cpu:gloo,acme:accl"``. A backend that is made
            for an accelerator is preferred.
    """
    pairs = [pair.partition(":") for pair in config.lower().split(",")]
    own = [device for device, _, backend in pairs if device != "cpu" and backend != "gloo"]
    return torch.device(own[0] if own else "cpu")
