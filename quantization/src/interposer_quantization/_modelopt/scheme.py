"""Checkpoints that NVIDIA ModelOpt exports: floats and integers of 8 or 4 bits, and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from interposer import CacheFormat, LinearMethod
from interposer_quantization._fp8.linear import Fp8TensorLinear
from interposer_quantization._modelopt.blocks import MxFp8Linear, NvFp4Linear
from interposer_quantization._modelopt.channels import Fp8ChannelLinear
from interposer_quantization._modelopt.config import Algorithm, Settings, Stored
from interposer_quantization._modelopt.input_scale import ScaledInputLinear
from interposer_quantization._modelopt.weights import (
    Fp8BlockWeightLinear,
    Int4WeightLinear,
    Int8WeightLinear,
    NvFp4WeightLinear,
)
from interposer_quantization._scheme import StoredScheme

_SAME_INPUT = (
    "export the model with a release of ModelOpt that makes them equal, or quantize it as "
    "FP8_PER_CHANNEL_PER_TOKEN, which has no such scale"
)

_METHODS: Mapping[Algorithm, Callable[[], LinearMethod]] = {
    "FP8": lambda: Fp8TensorLinear("weight_scale", "input_scale", mend=_SAME_INPUT),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8ChannelLinear,
    "FP8_PB_WO": lambda: Fp8BlockWeightLinear(None),
    "MXFP8": MxFp8Linear,
    "NVFP4": NvFp4Linear,
    "NVFP4_AWQ": lambda: ScaledInputLinear(NvFp4Linear()),
    "W4A16_NVFP4": lambda: NvFp4WeightLinear(None),
    "W8A16": lambda: Int8WeightLinear(None),
}


class ModelOpt(StoredScheme):
    """Weights in 8 or 4 bits; with floats of some kinds inputs are quantized on the way."""

    method = "modelopt"
    settings_class = Settings
    settings: Settings
    mend = "quantize them alike, or leave out all of them"

    def _method(self, stored: Stored) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        if stored.group_size is not None and stored.algorithm == "W4A16_AWQ":
            return ScaledInputLinear(Int4WeightLinear(stored.group_size))
        return _METHODS[stored.algorithm]()

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return FP8 with scales beside those of the projections, where the settings say so."""
        if not self.settings.has_quantized_cache:
            return None
        names = ("k_proj.k_scale", "v_proj.v_scale")
        return CacheFormat(torch.float8_e4m3fn, scale_names=names)
