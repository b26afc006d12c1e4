"""Matmul of an lm_head with the quantized weight of the tied embedding.

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


class WeightOnlyHead:
    """LM head with a quantized weight and hidden states in the model's dtype.

    Args:
        is_int4: the weight has 4 bits, else 8.
    """

    def __init__(self, is_int4: bool) -> None:
        self.is_int4 = is_int4
        # The ops take operands of the same names; their types differ.
        self.op: Any = w4a16_linear if is_int4 else w8a16_linear

    def dims(self, groups: Mapping[str, int]) -> dict[str, Any]:
        """Return the dims of the head's matmul op, except sizes."""
        scales = {"scale_dtype": "float32"} if self.is_int4 else {}
        return {**groups, "asymmetric": False, **scales}

    def bind_inputs(
        self, site: Site, hidden_size: int, matmul: BoundKernel[..., torch.Tensor]
    ) -> None:
        """Do nothing: hidden states are not quantized."""

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scales ``[V, G]`` unchanged; lookup and matmul take the same shape."""
        return scale

    def call(
        self, bound_kernel: BoundKernel[..., Any], quantized: torch.Tensor, scale: torch.Tensor
    ) -> Call:
        """Return the head's matmul function and operands."""
        constants = {"weight": quantized, "scale": scale, "bias": None, "zero_points": None}
        prepared = bound_kernel.prepared(**constants)
        return bound_kernel.function, tuple(prepared[name] for name in constants)


class QuantizedInputHead:
    """LM head with a quantized weight, and hidden states quantized to int8 per token.

    Args:
        is_int4: the weight has 4 bits; else it has 8 bits and one scale per row.
    """

    def __init__(self, is_int4: bool) -> None:
        self.is_int4 = is_int4
        self.op: Any = w4a8_linear if is_int4 else int8_linear

    def dims(self, groups: Mapping[str, int]) -> dict[str, Any]:
        """Return the dims of the head's matmul op, except sizes."""
        if self.is_int4:
            symmetric = {"asymmetric_inputs": False, "asymmetric_weights": False}
            return {**groups, "x_scales": "token", **symmetric}
        return {"x_scales": "token", "weight_scales": "channel", "asymmetric": False}

    def bind_inputs(
        self, site: Site, hidden_size: int, matmul: BoundKernel[..., torch.Tensor]
    ) -> None:
        """Bind the kernel that quantizes hidden states for the head."""
        self.function = matmul.function
        self.quantize = site.bind(quantize_int8_per_token, hidden_size=hidden_size)
        self.dtype = site.dtype

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales ``[V, G]``, or ``[V]`` for int8; lookup and matmul take the same shape."""
        return scale if self.is_int4 else scale.squeeze(1)

    def call(
        self, bound_kernel: BoundKernel[..., Any], quantized: torch.Tensor, scale: torch.Tensor
    ) -> Call:
        """Return the head's matmul function and operands."""
        # The two ops name their scale operands differently.
        constants: dict[str, Any] = {"weight": quantized}
        multiply: Callable[..., torch.Tensor]
        if self.is_int4:
            multiply = self._matmul_int4
            constants |= {"weight_scales": scale, "weight_zero_points": None, "bias": None}
        else:
            multiply = self._matmul_int8
            constants |= {"weight_scale": scale, "bias": None}
        kernel = CodedProduct(self.quantize, bound_kernel.function, multiply)
        prepared = bound_kernel.prepared(**constants)
        return kernel, tuple(prepared[name] for name in constants)

    def _matmul_int8(
        self,
        quantized: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: None,
    ) -> torch.Tensor:
        return self.function(quantized, weight, x_scale, weight_scale, None, bias, self.dtype)

    def _matmul_int4(
        self,
        quantized: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        zero_points: None,
        bias: None,
    ) -> torch.Tensor:
        return self.function(
            quantized, weight, x_scale, weight_scales, None, zero_points, bias, self.dtype
        )
