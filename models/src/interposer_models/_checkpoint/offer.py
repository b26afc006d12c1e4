"""New weights that are offered to a model, and buffers of the model to receive weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch


class TensorBuffer(Protocol):
    """Memory of the model for one tensor that arrives some rows at a time."""

    def memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory of stored rows; None if only ``put`` can store the rows."""
        ...

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Copy rows from row ``start`` on, or the part that the model needs."""
        ...


BufferFor = Callable[[str, Sequence[int], torch.dtype], TensorBuffer | None]
"""Returns the buffer for a tensor of a name, shape and dtype.

None if the tensor must arrive as a complete tensor instead.
"""


class Offer:
    """New weights for ``Weights.update``, which the model accepts or refuses without a peer.

    Open the offer as a context manager while weights are exchanged. A subclass learns in
    ``__exit__`` how the exchange ended, and can prevent the exchange in ``confirm``.

    Attributes:
        keeps_memory: whether the memory of replaced weights is kept for the next exchange.
    """

    keeps_memory: bool = False

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor | TensorBuffer]]) -> None:
        self._tensors = tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the exchange; ``error`` is the reason if the exchange failed."""

    def tensors(self, buffer_for: BufferFor) -> Iterator[tuple[str, torch.Tensor | TensorBuffer]]:
        """Yield names and tensors; requesting the next tensor may overwrite the last one.

        Args:
            buffer_for: returns model memory for a tensor that is about to arrive. If it returned a
                buffer, the full buffer is yielded instead of the tensor.
        """
        return iter(self._tensors)

    def is_exclusive(self, tensor: torch.Tensor) -> bool:
        """Say whether the model may keep the tensor's memory, as nothing else uses it."""
        return False

    def confirm(self) -> None:
        """Return if the prepared weights may replace the current ones; raise otherwise."""
