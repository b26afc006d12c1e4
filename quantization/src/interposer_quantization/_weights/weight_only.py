"""Binding of weight-only kernels: integer weights, inputs in the model's dtype.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer import BoundKernel, Site
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear


def bind_weight_only(
    site: Site,
    bits: int,
    in_features: int,
    out_features: int,
    group_size: int,
    asymmetric: bool = False,
    *,
    biased: bool,
) -> BoundKernel[Any, Any]:
    """Bind a kernel for 4-bit or 8-bit weights with float32 scales per group of inputs."""
    # Both ops take the same operands, but are of different types.
    op: Any = w4a16_linear if bits == 4 else w8a16_linear
    # Only the 4-bit op has a dim for the dtype of its scales.
    scales = {"scale_dtype": "float32"} if bits == 4 else {}
    bound_kernel: BoundKernel[Any, Any] = site.bind_kernel(
        op,
        in_features=in_features,
        out_features=out_features,
        group_size=group_size,
        num_groups=in_features // group_size,
        asymmetric=asymmetric,
        biased=biased,
        **scales,
    )
    return bound_kernel


def matmul_sorted_inputs(
    kernel: Callable[..., torch.Tensor], x: torch.Tensor, order: torch.Tensor, *operands: Any
) -> torch.Tensor:
    """Multiply ``x`` by a weight with sorted inputs, after permuting ``x`` by ``order``."""
    return kernel(x.index_select(-1, order), *operands)
