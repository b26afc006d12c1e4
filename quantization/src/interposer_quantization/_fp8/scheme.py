"""Schemes of FP8 checkpoints: from transformers, DeepSeek and AutoFP8, and from FBGEMM."""

from __future__ import annotations

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._fp8.block_linear import Fp8BlockLinear
from interposer_quantization._fp8.config import FbgemmSettings, Fp8Settings
from interposer_quantization._fp8.experts import (
    Fp8Experts,
    fp8_block_experts,
    is_fused_op_requested,
)
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._scheme import StoredScheme

_MEND = "quantize all of them, or name all of them in 'modules_to_not_convert'"
_SAME_INPUT = "calibrate them on the same input, or quantize with activation_scheme 'dynamic'"


class Fp8(StoredScheme):
    """Scheme of FP8 weights with scales per block or tensor; inputs are quantized at run time."""

    method = "fp8"
    settings_class = Fp8Settings
    settings: Fp8Settings
    mend = _MEND

    def _method(self, stored: str) -> LinearMethod:
        weight_scale, input_scale = self.settings.scale_names
        if self.settings.weight_block_size is not None:
            rows, columns = self.settings.weight_block_size
            # UE8M0 is the format of power-of-two scales.
            power_of_two = self.settings.scale_fmt == "ue8m0"
            return Fp8BlockLinear(rows, columns, power_of_two, weight_scale)
        static = self.settings.activation_scheme == "static"
        return Fp8TensorLinear(weight_scale, input_scale if static else None, mend=_SAME_INPUT)

    def _fused_experts_method(
        self, stored: str, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        settings, scale_name = self.settings, self.settings.scale_names[0]
        block = settings.weight_block_size
        if block is not None:
            return fp8_block_experts(spec, (block[0], block[1]), scale_name)
        is_dynamic = settings.activation_scheme == "dynamic"
        return (
            Fp8Experts("tensor", scale_name) if is_dynamic and is_fused_op_requested(site) else None
        )


class FbgemmFp8(StoredScheme):
    """Scheme of FP8 weights with a scale per output; inputs quantized per token, up to a bound."""

    method = "fbgemm_fp8"
    settings_class = FbgemmSettings
    settings: FbgemmSettings
    mend = _MEND

    def _method(self, stored: str) -> LinearMethod:
        return Fp8RowLinear(self.settings.activation_scale_ub)
