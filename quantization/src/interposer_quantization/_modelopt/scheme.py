"""Scheme of NVIDIA ModelOpt checkpoints: 8-bit and 4-bit formats, also mixed within a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from interposer import CacheFormat, ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._compressed_tensors.fp8_linear import Fp8WeightLinear
from interposer_quantization._compressed_tensors.mx_linear import Mxfp8Linear
from interposer_quantization._compressed_tensors.nvfp4_linear import (
    MODELOPT,
    Nvfp4Linear,
    Nvfp4WeightLinear,
)
from interposer_quantization._compressed_tensors.stored import Weights
from interposer_quantization._fp8.experts import fp8_block_experts
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._modelopt.config import Algorithm, Settings, Stored
from interposer_quantization._modelopt.input_scale import ScaledInputLinear
from interposer_quantization._modelopt.weights import Int4WeightLinear, Int8WeightLinear
from interposer_quantization._scheme import StoredScheme

_SAME_INPUT = (
    "export the model with a release of ModelOpt that gives fused layers one input_scale, or "
    "quantize the model as FP8_PER_CHANNEL_PER_TOKEN, which stores no input_scale"
)

_BLOCKS = Weights("float", 8, True, "block", (128, 128), reordered=False)
_METHODS: Mapping[Algorithm, Callable[[], LinearMethod]] = {
    "FP8": lambda: Fp8TensorLinear("weight_scale", "input_scale", mend=_SAME_INPUT),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: Fp8RowLinear(flat=True),
    "FP8_PB_WO": lambda: Fp8WeightLinear(_BLOCKS, None, spread=True),
    # ModelOpt rounds scales up; the OCP specification rounds down. Inputs follow the weights.
    "MXFP8": lambda: Mxfp8Linear(rounds_up=True),
    "NVFP4": lambda: Nvfp4Linear(MODELOPT),
    "NVFP4_AWQ": lambda: ScaledInputLinear(Nvfp4Linear(MODELOPT)),
    "W4A16_NVFP4": lambda: Nvfp4WeightLinear(None, MODELOPT),
    "W8A16": lambda: Int8WeightLinear(None),
}


class ModelOpt(StoredScheme):
    """Scheme of 8-bit or 4-bit weights; some float formats also quantize inputs at run time."""

    method = "modelopt"
    settings_class = Settings
    settings: Settings
    mend = "quantize them alike, or leave out all of them"

    def _method(self, stored: Stored) -> LinearMethod:
        if stored.group_size is not None and stored.algorithm == "W4A16_AWQ":
            return ScaledInputLinear(Int4WeightLinear(stored.group_size))
        return _METHODS[stored.algorithm]()

    def _fused_experts_method(
        self, stored: Stored, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        # The only weight-only format with an op for experts.
        if stored.algorithm != "FP8_PB_WO" or _BLOCKS.size is None:
            return None
        return fp8_block_experts(spec, _BLOCKS.size, "weight_scale", spread=True)

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return the FP8 cache format with ``k_scale`` and ``v_scale``, or None."""
        if not self.settings.has_quantized_cache:
            return None
        names = ("k_proj.k_scale", "v_proj.v_scale")
        return CacheFormat(torch.float8_e4m3fn, scale_names=names)
