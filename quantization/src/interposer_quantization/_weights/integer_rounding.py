"""Plain weights to integers by the op that is chosen for it.

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
class Rounded:
    """A weight as codes and scales.

    Attributes:
        codes: ``[O, I]`` int8, or ``[O, I / 2]`` uint8 of two codes each.
        scale: ``[O, G]`` float32.
        zero_points: ``[O, G]`` uint8, None where codes are symmetric.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_points: torch.Tensor | None = None

    @property
    def finite(self) -> bool:
        """Say whether all scales are finite, as those of a finite weight are."""
        return bool(self.scale.isfinite().all())


class IntegerRounding:
    """Rounds weights of one site to a format of 8 bits, or of 4 with an even number of inputs.

    Args:
        sizes: O and I, which groups divide.
        scale_dtype: that scales are rounded to before numbers are divided by them.
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
        stored = {**dims, "scale_dtype": str(scale_dtype).removeprefix("torch.")}
        if not chosen.symmetric:
            self.asymmetric = site.bind(quantize_weight_int4_asymmetric, **dims)
        elif chosen.bits == 4:
            self.symmetric = site.bind(quantize_weight_int4, **stored)
        else:
            self.symmetric = site.bind(quantize_weight_int8, **stored)

    def __call__(self, weight: torch.Tensor) -> Rounded:
        """Return what ``weight`` ``[O, I]`` is rounded to."""
        if not self.chosen.symmetric:
            return Rounded(*self.asymmetric(weight, self.group_size))
        return Rounded(*self.symmetric(weight, self.group_size, self.scale_dtype))
