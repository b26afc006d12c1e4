"""Linear layers of 8-bit floats with a scale per output and one per token.

Dimensions: O output features.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer_quantization._fp8.linear import Fp8TensorLinear
from interposer_quantization._fp8.parameters import register


class Fp8ChannelLinear(Fp8TensorLinear):
    """``weight`` ``[O, I]`` float8_e4m3fn with ``weight_scale`` ``[O]``; inputs per token."""

    def __init__(self) -> None:
        super().__init__("weight_scale")

    def _create_scale(self, layer: nn.Module) -> bool:
        num_outputs = sum(self.members.sizes.values())
        register(layer, **{self.weight_scale: torch.empty(num_outputs, dtype=torch.float32)})
        return True

    def _scale(self, layer: nn.Module) -> torch.Tensor:
        return layer.get_parameter(self.weight_scale)
