"""Hidden states of a step, for whoever predicts further tokens by them.

Dimensions: T tokens of the step, H hidden size, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStates:
    """Receives the states of all tokens of each step of a ``Decoder``.

    Attributes:
        layers: blocks whose inputs are wanted, in order; none of them wants what the final norm
            returns.
        latest: ``[T, L * H]`` of these blocks, or ``[T, H]``, of the last step that was computed.
    """

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers
        self.latest: Tensor | None = None
        self._inputs: list[Tensor] = []

    def enter(self, index: int, x: Tensor, residual: Tensor | None) -> None:
        """Take the input of a block: what is to be added to the stream, and the stream."""
        if index == 0:
            self._inputs = []
        if index in self.layers:
            self._inputs.append(x if residual is None else (residual + x).to(x.dtype))

    def leave(self, normalised: Tensor) -> None:
        """Take what the final norm returns."""
        inputs, self._inputs = self._inputs, []
        self.latest = torch.cat(inputs, -1) if self.layers else normalised
