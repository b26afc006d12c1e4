"""Linear layers of 4-bit integer weights, two per byte, in the layout of the ops.

Dimensions: I input features, O output features, G groups.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import Site
from interposer_ops.quantizers import unpack_nibbles
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._weights.packed_linear import register_stored

# Midpoint of the unsigned 4-bit range; it stands for 0.
_MIDDLE = 8


class NibbleIntLinear(IntLinear):
    """Linear method for ``weight`` ``[O, I / 2]`` and ``weight_zero_point`` ``[O, G]``.

    Both are uint8 with values from 0 to 15; a byte of ``weight`` holds two of them. No checkpoint
    uses this layout: plain weights are quantized to it while loading.
    """

    def register_quantized_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register ``weight`` and, if weights are asymmetric, ``weight_zero_point``."""
        pairs = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        register_stored(layer, "weight", pairs)
        if not self.weights.symmetric:
            zeros = torch.empty(out_features, self.num_groups, dtype=torch.uint8)
            register_stored(layer, "weight_zero_point", zeros)

    def quantized_weight(self, layer: nn.Module) -> torch.Tensor:
        """Return the quantized weight ``[O, I]`` int8."""
        return _to_signed(unpack_nibbles(layer.get_parameter("weight")))

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, or None if the weight is symmetric."""
        if self.weights.symmetric:
            return None
        return _to_signed(layer.get_parameter("weight_zero_point"))

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the registered tensors as the op's constants.

        Raises: CheckpointError: a scale is zero or not finite.
        """
        parameters = layer._parameters
        zeros = None if self.weights.symmetric else parameters["weight_zero_point"]
        return {
            "weight": parameters["weight"],
            "scale": self.check_scales(layer),
            "zero_points": zeros,
        }


def _to_signed(unsigned: torch.Tensor) -> torch.Tensor:
    # Values up to 15 fit int8, so the view changes no value.
    return unsigned.view(torch.int8) - _MIDDLE
