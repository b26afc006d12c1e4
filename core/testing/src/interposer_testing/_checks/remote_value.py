"""A value that another process holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RemoteValue:
    """A value of another process, such as a prepared constant.

    Attributes:
        number: number of the value in that process.
        kind: name of its class there.
        mirrored: returns copies of those of its storages that a result shares.
    """

    number: int
    kind: str = ""
    mirrored: Callable[[], list[torch.Tensor]] = list
