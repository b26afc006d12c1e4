"""Scheme of compressed-tensors checkpoints."""

from __future__ import annotations

import torch

from interposer import CacheFormat, ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._compressed_tensors.config import Settings
from interposer_quantization._compressed_tensors.experts import fused_experts_method
from interposer_quantization._compressed_tensors.fp8_linear import Fp8WeightLinear
from interposer_quantization._compressed_tensors.int8_linear import Int8Linear
from interposer_quantization._compressed_tensors.int_linear import IntLinear, PlainIntLinear
from interposer_quantization._compressed_tensors.mx_linear import Mxfp4Linear, Mxfp8Linear
from interposer_quantization._compressed_tensors.nvfp4_linear import Nvfp4Linear, Nvfp4WeightLinear
from interposer_quantization._compressed_tensors.packed_linear import PackedIntLinear
from interposer_quantization._compressed_tensors.stored import Inputs, Stored, Weights
from interposer_quantization._compressed_tensors.w4a8_linear import W4A8Linear
from interposer_quantization._fp8.block_linear import Fp8BlockLinear
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._fp8.parameters import FORMAT
from interposer_quantization._scheme import HeadScheme

_MEND = "quantize these layers with the same settings, or name all of them in 'ignore'"


class CompressedTensors(HeadScheme):
    """Scheme of integer and float formats up to 8 bits; each group of layers has its own format."""

    method = "compressed-tensors"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Stored) -> LinearMethod:
        return _method(stored)

    def _fused_experts_method(
        self, stored: Stored, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        return fused_experts_method(stored, site, spec)

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return the format of an 8-bit KV cache, or None if the cache is not quantized."""
        cache = self.settings.kv_cache_scheme
        if cache is None:
            return None
        # An 8-bit cache holds integers or FP8 values.
        dtype = torch.int8 if cache.type == "int" else FORMAT
        return CacheFormat(dtype, head_scales=cache.strategy == "attn_head")


def _method(stored: Stored) -> LinearMethod:
    weights, inputs = stored.weights, stored.inputs
    if inputs is not None and stored.has_quantized_matmul:
        return _quantized_matmul_method(stored.form, weights, inputs)
    if stored.form == "mxfp4-pack-quantized":
        return Mxfp4Linear(inputs)
    if stored.form == "nvfp4-pack-quantized":
        return Nvfp4WeightLinear(inputs)
    if weights.kind == "int":
        return _integers(stored.form, weights, inputs)
    return Fp8WeightLinear(weights, inputs, exponents=stored.form == "mxfp8-quantized")


def _integers(form: str, weights: Weights, inputs: Inputs | None) -> IntLinear:
    """Return the method for integer weights with inputs in the model's dtype."""
    is_packed = form == "pack-quantized"
    return PackedIntLinear(weights, inputs) if is_packed else PlainIntLinear(weights, inputs)


def _quantized_matmul_method(form: str, weights: Weights, inputs: Inputs) -> LinearMethod:
    """Return the method that multiplies quantized inputs by quantized weights."""
    if form == "nvfp4-pack-quantized":
        return Nvfp4Linear()
    if form == "mxfp8-quantized":
        return Mxfp8Linear()
    if weights.kind == "int":
        # 4-bit weights with int8 inputs have an op of their own.
        if weights.bits <= 4:
            return W4A8Linear(_integers(form, weights, None), inputs)
        return Int8Linear(weights, inputs)
    if weights.size is not None:
        rows, columns = weights.size
        return Fp8BlockLinear(rows, columns, power_of_two_scales=False, scale_name="weight_scale")
    input_scale = "input_scale" if inputs.static else None
    if weights.strategy == "tensor":
        return Fp8TensorLinear("weight_scale", input_scale)
    return Fp8RowLinear(input_scale=input_scale)
