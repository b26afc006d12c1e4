"""Inputs that are rounded to few bits, for which no op has codes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interposer import Site
from interposer_ops.quantizers import (
    decode_e8m0,
    dequantize_mxfp4,
    quantize_fp8_blocks,
    quantize_fp8_per_token,
    quantize_int8_per_token,
    quantize_int8_per_token_asymmetric,
    quantize_mxfp4,
    quantize_mxfp8,
)
from interposer_quantization._compressed_tensors.stored import MX_GROUP, Inputs
from interposer_quantization._fp8.parameters import FORMAT, FORMAT_NAME

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Of ``[..., I]``, returns the nearest numbers that the quantized input can stand for."""


def bound_rounding(inputs: Inputs, site: Site, in_features: int) -> Rounding:
    """Return the function that quantizes an input and dequantizes it again.

    They are in the input's dtype.
    """
    if inputs.kind == "int":
        return _int8_rounding(inputs, site, in_features)
    if inputs.exponents:
        return _mx_rounding(inputs, site, in_features)
    size = inputs.inputs_per_scale
    if size is None:
        per_token = site.bind(
            quantize_fp8_per_token, hidden_size=in_features, out_dtype=FORMAT_NAME, limited=False
        )

        def round_tokens(x: torch.Tensor) -> torch.Tensor:
            quantized, scale = per_token(x, FORMAT, None)
            return (quantized.to(scale.dtype) * scale).to(x.dtype)

        return round_tokens
    blocks = site.bind(
        quantize_fp8_blocks,
        hidden_size=in_features,
        block_size=size,
        out_dtype=FORMAT_NAME,
        power_of_two_scales=False,
    )

    def round_blocks(x: torch.Tensor) -> torch.Tensor:
        quantized, scales = blocks(x, size, FORMAT, False)
        columns = scales.repeat_interleave(size, -1)[..., : x.shape[-1]]
        return (quantized.to(scales.dtype) * columns).to(x.dtype)

    return round_blocks


def _int8_rounding(inputs: Inputs, site: Site, in_features: int) -> Rounding:
    if inputs.symmetric:
        symmetric = site.bind(quantize_int8_per_token, hidden_size=in_features)

        def round_symmetric(x: torch.Tensor) -> torch.Tensor:
            quantized, scale = symmetric(x)
            return (quantized.to(scale.dtype) * scale).to(x.dtype)

        return round_symmetric
    asymmetric = site.bind(quantize_int8_per_token_asymmetric, hidden_size=in_features)

    def round_asymmetric(x: torch.Tensor) -> torch.Tensor:
        quantized, scale, zero_point = asymmetric(x)
        return ((quantized.int() - zero_point).to(scale.dtype) * scale).to(x.dtype)

    return round_asymmetric


def _mx_rounding(inputs: Inputs, site: Site, in_features: int) -> Rounding:
    if inputs.bits == 4:
        quantize = site.bind(quantize_mxfp4, hidden_size=in_features)
        dequantize = site.bind(dequantize_mxfp4, hidden_size=in_features)

        def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
            packed, scales = quantize(x)
            return dequantize(packed, scales, x.dtype)

        return round_mxfp4
    quantize_wide = site.bind(quantize_mxfp8, hidden_size=in_features)

    def round_mxfp8(x: torch.Tensor) -> torch.Tensor:
        quantized, exponents = quantize_wide(x)
        scales = decode_e8m0(exponents, torch.float32).unsqueeze(-1)
        blocks = quantized.float().unflatten(-1, (scales.shape[-2], MX_GROUP)) * scales
        rounded: torch.Tensor = blocks.flatten(-2).to(x.dtype)
        return rounded

    return round_mxfp8
