"""Tensors that are offered to an update, and whoever has a say in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch


class Room(Protocol):
    """Memory of the model for one tensor that comes some rows at a time."""

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return where rows may be written as they are stored; None: only ``put`` can."""
        ...

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Take rows from ``start``, or what the model needs of them."""
        ...


Rooms = Callable[[str, Sequence[int], torch.dtype], Room | None]
"""Return the room for a tensor of a name, shape and dtype; None where it is to come whole."""


class Offer:
    """New weights whose giver lets the model decide alone. Open while they are exchanged.

    A subclass is told how the exchange ends, and can prevent it as long as nothing is changed.

    Attributes:
        keeps_memory: that of the present weights is kept for the next exchange.
    """

    keeps_memory: bool = False

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor | Room]]) -> None:
        self._tensors = tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take note of the end."""

    def given(self, rooms: Rooms) -> Iterator[tuple[str, torch.Tensor | Room]]:
        """Yield names and tensors; one may be written over when the next one is asked for.

        Args:
            rooms: can be asked for memory of tensors that are to come. A room that was asked for is
                yielded, once it is full, in place of the tensor.
        """
        return iter(self._tensors)

    def gives(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in memory that nobody else has, and is the model's to keep."""
        return False

    def agree(self) -> None:
        """Return if the weights, which are prepared, are to be those of the model from now on."""
