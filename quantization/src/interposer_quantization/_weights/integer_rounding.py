"""Rounding of float weights to integers by the selected quantization op.

Dimensions: O output features, I input features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interposer import Site
from interposer_ops.quantizers import (
    quantize_weight_int4,
    quantize_weight_int4_asymmetric,
    quantize_weight_int8,
)
from interposer_quantization.writing._integer_formats import IntegerFormat


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """Result of weight quantization: quantized values, scales and zero points.

    Attributes:
        quantized: ``[O, I]`` int8, or ``[O, I / 2]`` uint8 with two values per byte.
        scale: ``[O, G]`` float32.
        zero_points: ``[O, G]`` uint8, or None for symmetric quantization.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    zero_points: torch.Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether all scales are finite; this holds whenever the weight is finite."""
        return bool(self.scale.isfinite().all())


class IntegerRounding:
    """Function object that quantizes a layer's weight to int8, or to int4 for an even input size.

    Args:
        chosen: target format.
        sizes: O and I; the group size must divide I.
        scale_dtype: dtype to which scales are rounded before the division.
    """

    def __init__(
        self,
        chosen: IntegerFormat,
        site: Site,
        sizes: tuple[int, int],
        scale_dtype: torch.dtype,
    ) -> None:
        outputs, inputs = sizes
        self.chosen = chosen
        self.group_size = chosen.inputs_per_scale or inputs
        self.scale_dtype = scale_dtype
        dims: dict[str, int | str] = {
            "in_features": inputs,
            "out_features": outputs,
            "num_groups": inputs // self.group_size,
        }
        # The asymmetric op has no scale_dtype: its scales are always float32.
        stored = {**dims, "scale_dtype": str(scale_dtype).removeprefix("torch.")}
        if not chosen.symmetric:
            self.asymmetric = site.bind(quantize_weight_int4_asymmetric, **dims)
        elif chosen.bits == 4:
            self.symmetric = site.bind(quantize_weight_int4, **stored)
        else:
            self.symmetric = site.bind(quantize_weight_int8, **stored)

    def __call__(self, weight: torch.Tensor) -> RoundedWeight:
        """Quantize ``weight`` ``[O, I]`` to integers and scales."""
        if not self.chosen.symmetric:
            return RoundedWeight(*self.asymmetric(weight, self.group_size))
        return RoundedWeight(*self.symmetric(weight, self.group_size, self.scale_dtype))
