"""Products of an lm_head and the integers of an embedding that it is tied to.

Dimensions: T tokens, V vocabulary, H hidden size, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from interposer import BoundKernel, Call, Site
from interposer_ops.quantized_linear import (
    CodedProduct,
    int8_linear,
    w4a8_linear,
    w4a16_linear,
    w8a16_linear,
)
from interposer_ops.quantizers import quantize_int8_per_token


class PlainHead:
    """Hidden states are multiplied as they are.

    Args:
        narrow: whether codes have 4 bits, else they have 8.
    """

    def __init__(self, narrow: bool) -> None:
        self.narrow = narrow
        # Both ops take operands of the same names.
        self.op: Any = w4a16_linear if narrow else w8a16_linear

    def dims(self, groups: Mapping[str, int]) -> dict[str, Any]:
        """Return dims of the op besides its sizes."""
        scales = {"scale_dtype": "float32"} if self.narrow else {}
        return {**groups, "asymmetric": False, **scales}

    def bind_inputs(
        self, site: Site, hidden_size: int, product: BoundKernel[..., torch.Tensor]
    ) -> None:
        """Bind what is done with hidden states before: nothing."""

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales ``[V, G]`` as lookup and product both take them."""
        return scale

    def call(self, bound: BoundKernel[..., Any], codes: torch.Tensor, scale: torch.Tensor) -> Call:
        """Return the function and the operands of a head."""
        constants = {"weight": codes, "scale": scale, "bias": None, "zero_points": None}
        held = bound.prepared(**constants)
        return bound.function, tuple(held[name] for name in constants)


class RoundedHead:
    """Hidden states are rounded to int8 with a scale for each token.

    Args:
        narrow: whether codes have 4 bits, else they have 8, and one scale a row.
    """

    def __init__(self, narrow: bool) -> None:
        self.narrow = narrow
        self.op: Any = w4a8_linear if narrow else int8_linear

    def dims(self, groups: Mapping[str, int]) -> dict[str, Any]:
        """Return dims of the op besides its sizes."""
        if self.narrow:
            symmetric = {"asymmetric_inputs": False, "asymmetric_weights": False}
            return {**groups, "x_scales": "token", **symmetric}
        return {"x_scales": "token", "weight_scales": "channel", "asymmetric": False}

    def bind_inputs(
        self, site: Site, hidden_size: int, product: BoundKernel[..., torch.Tensor]
    ) -> None:
        """Bind the quantizer of hidden states at the site of the head, before its ``product``."""
        self.function = product.function
        self.quantize = site.bind(quantize_int8_per_token, hidden_size=hidden_size)
        self.dtype = site.dtype

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales ``[V, G]``, or ``[V]`` of int8, as lookup and product both take them."""
        return scale if self.narrow else scale.squeeze(1)

    def call(self, bound: BoundKernel[..., Any], codes: torch.Tensor, scale: torch.Tensor) -> Call:
        """Return the function and the operands of a head."""
        constants: dict[str, Any] = {"weight": codes}
        multiply: Callable[..., torch.Tensor]
        if self.narrow:
            multiply = self._four_bits
            constants |= {"weight_scales": scale, "weight_zero_points": None, "bias": None}
        else:
            multiply = self._eight_bits
            constants |= {"weight_scale": scale, "bias": None}
        coded = CodedProduct(self.quantize, bound.function, multiply)
        held = bound.prepared(**constants)
        return coded, tuple(held[name] for name in constants)

    def _eight_bits(
        self,
        codes: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: None,
    ) -> torch.Tensor:
        return self.function(codes, weight, x_scale, weight_scale, None, bias, self.dtype)

    def _four_bits(
        self,
        codes: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        zero_points: None,
        bias: None,
    ) -> torch.Tensor:
        return self.function(
            codes, weight, x_scale, weight_scales, None, zero_points, bias, self.dtype
        )
