"""Fake quantization of inputs, for formats without a matmul op that takes quantized inputs."""

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

FakeQuantizer = Callable[[torch.Tensor], torch.Tensor]
"""Function that quantizes an input ``[..., I]`` and dequantizes it to the input's dtype."""


def bind_fake_quantizer(inputs: Inputs, site: Site, in_features: int) -> FakeQuantizer:
    """Bind a function that quantizes and dequantizes an input, in the input's dtype."""
    if inputs.kind == "int":
        return _bind_int8_fake_quantizer(inputs, site, in_features)
    if inputs.exponents:
        return _bind_mx_fake_quantizer(inputs, site, in_features)
    size = inputs.inputs_per_scale
    # No groups: one scale per token.
    if size is None:
        quantize_tokens = site.bind(
            quantize_fp8_per_token, hidden_size=in_features, out_dtype=FORMAT_NAME, limited=False
        )

        def round_tokens(x: torch.Tensor) -> torch.Tensor:
            quantized, scale = quantize_tokens(x, FORMAT, None)
            return (quantized.to(scale.dtype) * scale).to(x.dtype)

        return round_tokens
    quantize_blocks = site.bind(
        quantize_fp8_blocks,
        hidden_size=in_features,
        block_size=size,
        out_dtype=FORMAT_NAME,
        power_of_two_scales=False,
    )

    def round_blocks(x: torch.Tensor) -> torch.Tensor:
        quantized, scales = quantize_blocks(x, size, FORMAT, False)
        columns = scales.repeat_interleave(size, -1)[..., : x.shape[-1]]
        return (quantized.to(scales.dtype) * columns).to(x.dtype)

    return round_blocks


def _bind_int8_fake_quantizer(inputs: Inputs, site: Site, in_features: int) -> FakeQuantizer:
    if inputs.symmetric:
        quantize = site.bind(quantize_int8_per_token, hidden_size=in_features)

        def round_symmetric(x: torch.Tensor) -> torch.Tensor:
            quantized, scale = quantize(x)
            return (quantized.to(scale.dtype) * scale).to(x.dtype)

        return round_symmetric
    quantize_asymmetric = site.bind(quantize_int8_per_token_asymmetric, hidden_size=in_features)

    def round_asymmetric(x: torch.Tensor) -> torch.Tensor:
        quantized, scale, zero_point = quantize_asymmetric(x)
        return ((quantized.int() - zero_point).to(scale.dtype) * scale).to(x.dtype)

    return round_asymmetric


def _bind_mx_fake_quantizer(inputs: Inputs, site: Site, in_features: int) -> FakeQuantizer:
    if inputs.bits == 4:
        quantize_fp4 = site.bind(quantize_mxfp4, hidden_size=in_features)
        dequantize = site.bind(dequantize_mxfp4, hidden_size=in_features)

        def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
            packed, scales = quantize_fp4(x)
            return dequantize(packed, scales, x.dtype)

        return round_mxfp4
    quantize_fp8 = site.bind(quantize_mxfp8, hidden_size=in_features)

    def round_mxfp8(x: torch.Tensor) -> torch.Tensor:
        quantized, exponents = quantize_fp8(x)
        # [..., I / 32, 1], to broadcast over the 32 values of a group.
        scales = decode_e8m0(exponents, torch.float32).unsqueeze(-1)
        blocks = quantized.float().unflatten(-1, (scales.shape[-2], MX_GROUP)) * scales
        rounded: torch.Tensor = blocks.flatten(-2).to(x.dtype)
        return rounded

    return round_mxfp8
