"""Linear layers of integer weights of four bits, held as ops take them.

Dimensions: I input features, O output features, G groups.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import Site
from interposer_ops.quantizers import unpack_nibbles
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._weights.packed_linear import register_stored

_MIDDLE = 8


class PairedIntLinear(IntLinear):
    """``weight`` ``[O, I / 2]``, each of two codes, and ``weight_zero_point`` ``[O, G]``.

    Both are uint8, from 0 to 15. No checkpoint stores them so: weights are rounded to them.
    """

    def register_codes(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register ``weight`` and, if weights are asymmetric, ``weight_zero_point``."""
        pairs = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        register_stored(layer, "weight", pairs)
        if not self.weights.symmetric:
            zeros = torch.empty(out_features, self.num_groups, dtype=torch.uint8)
            register_stored(layer, "weight_zero_point", zeros)

    def codes(self, layer: nn.Module) -> torch.Tensor:
        """Return the codes ``[O, I]`` int8, signed."""
        return _signed(unpack_nibbles(layer.get_parameter("weight")))

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, signed, or None where all are 0."""
        if self.weights.symmetric:
            return None
        return _signed(layer.get_parameter("weight_zero_point"))

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return what is held.

        Raises: CheckpointError: a scale is zero or not finite.
        """
        held = layer._parameters
        zeros = None if self.weights.symmetric else held["weight_zero_point"]
        return {"weight": held["weight"], "scale": self.check_scales(layer), "zero_points": zeros}


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8) - _MIDDLE
