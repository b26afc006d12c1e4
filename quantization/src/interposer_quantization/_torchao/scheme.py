"""Scheme of torchao checkpoints in safetensors."""

from __future__ import annotations

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._compressed_tensors import stored as compressed
from interposer_quantization._compressed_tensors.fp8_linear import Fp8WeightLinear
from interposer_quantization._fp8.experts import Fp8Experts
from interposer_quantization._fp8.linear import Fp8RowLinear
from interposer_quantization._scheme import StoredScheme
from interposer_quantization._torchao.config import Settings, Weights
from interposer_quantization._torchao.linear import (
    SCALE,
    WEIGHT,
    TorchAoInt8Linear,
    TorchAoLinear,
)


class TorchAo(StoredScheme):
    """Scheme of 8-bit integer or FP8 weights; some formats quantize inputs at run time."""

    method = "torchao"
    settings_class = Settings
    settings: Settings
    mend = "name all of them in 'modules_to_not_convert', or none"

    def _method(self, stored: Weights) -> LinearMethod:
        plain = stored.inputs == "plain"
        if stored.kind == "float8":
            return _fp8_method(plain)
        # int8_linear takes symmetric weights with one scale per output only.
        if plain or not stored.symmetric or stored.inputs_per_scale is not None:
            return TorchAoLinear(stored)
        return TorchAoInt8Linear(stored)

    def _fused_experts_method(
        self, stored: Weights, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        if stored.kind != "float8" or stored.inputs != "plain":
            return None
        return Fp8Experts("channel", SCALE, weight_name=WEIGHT)


def _fp8_method(has_plain_inputs: bool) -> LinearMethod:
    """Return the method for FP8 weights with one scale per output.

    Source: ``Float8Tensor`` of torchao 0.18, quantized per row.
    """
    if has_plain_inputs:
        weights = compressed.Weights("float", 8, True, "channel", None, reordered=False)
        return Fp8WeightLinear(weights, None, weight=WEIGHT, scale=SCALE)
    return Fp8RowLinear(weight=WEIGHT, weight_scale=SCALE)
