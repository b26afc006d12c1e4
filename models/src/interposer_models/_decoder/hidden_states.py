"""Hidden states of a step, for draft models that read hidden states.

Dimensions: T tokens of the step, H hidden size, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStates:
    """Receives the hidden states of all tokens in each step of a ``Decoder``.

    Attributes:
        layers: indices of the blocks whose inputs are recorded, in order; an empty tuple records
            the output of the final norm.
        latest: ``[T, L * H]`` of ``layers``, or ``[T, H]`` of the final norm, of the latest step.
    """

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers
        self.latest: Tensor | None = None
        self._inputs: list[Tensor] = []

    def record_block_input(self, index: int, x: Tensor, residual: Tensor | None) -> None:
        """Record the input of block ``index``: the residual stream plus ``x``."""
        # The first block begins a new step; an earlier step may have failed halfway.
        if index == 0:
            self._inputs = []
        if index in self.layers:
            self._inputs.append(x if residual is None else (residual + x).to(x.dtype))

    def record_final_output(self, normalised: Tensor) -> None:
        """Record the output of the final norm, which ends the step."""
        inputs, self._inputs = self._inputs, []
        self.latest = torch.cat(inputs, -1) if self.layers else normalised
