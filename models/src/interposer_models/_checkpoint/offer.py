"""Tensors that are offered to an update, and whoever has a say in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import torch


class Offer:
    """New weights whose giver lets the model decide alone. Open while they are exchanged.

    A subclass is told how the exchange ends, and can prevent it as long as nothing is changed.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
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

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; one may be written over when the next one is asked for."""
        return iter(self._tensors)

    def gives(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in memory that nobody else has, and is the model's to keep."""
        return False

    def agree(self) -> None:
        """Return if the weights, which are prepared, are to be those of the model from now on."""
