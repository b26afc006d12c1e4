"""Checkpoints that NVIDIA ModelOpt exports: 8-bit floats, MXFP8, NVFP4, and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from interposer import CacheFormat, LinearMethod, QuantizationScheme
from interposer_quantization.fp8_linear import Fp8TensorLinear
from interposer_quantization.fused_layers import stored_alike
from interposer_quantization.modelopt_blocks import MxFp8Linear, NvFp4Linear
from interposer_quantization.modelopt_channels import Fp8ChannelLinear
from interposer_quantization.modelopt_config import Algorithm, Settings

__all__ = ["ModelOpt"]

_METHODS: Mapping[Algorithm, Callable[[], LinearMethod]] = {
    "FP8": lambda: Fp8TensorLinear("weight_scale", "input_scale"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8ChannelLinear,
    "NVFP4": NvFp4Linear,
    "MXFP8": MxFp8Linear,
}


class ModelOpt(QuantizationScheme):
    """Floats of 8 or 4 bits whose inputs are quantized as well, on the way."""

    method = "modelopt"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> ModelOpt:
        """Return the scheme that ``quantization_config`` or hf_quant_config.json describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: layers that are fused there are quantized in different ways.
        """
        mend = "quantize them alike, or leave out all of them"
        found: Algorithm | None = stored_alike(prefix, parts, self.settings.stored, mend)
        return None if found is None else _METHODS[found]()

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return FP8 with scales beside those of the projections, where the settings say so."""
        if not self.settings.has_quantized_cache:
            return None
        names = ("k_proj.k_scale", "v_proj.v_scale")
        return CacheFormat(torch.float8_e4m3fn, scale_names=names)
