"""Checkpoints of torchao that are stored as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer import LinearMethod, QuantizationScheme
from interposer_quantization._torchao.config import Settings
from interposer_quantization._torchao.fp8_linear import TorchAoFp8Linear, TorchAoFp8WeightLinear
from interposer_quantization._torchao.int8_linear import TorchAoInt8Linear
from interposer_quantization._torchao.linear import TorchAoLinear
from interposer_quantization._weights.fused_layers import stored_alike


class TorchAo(QuantizationScheme):
    """Integers in 8 bits each, or 8-bit floats; inputs as they are, or quantized on the way."""

    method = "torchao"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> TorchAo:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: of the layers that are fused there only some are quantized.
        """
        mend = "name all of them in 'modules_to_not_convert', or none"
        found = stored_alike(prefix, parts, self.settings.weights, mend)
        if found is None:
            return None
        plain = found.inputs == "plain"
        if found.kind == "float8":
            return TorchAoFp8WeightLinear(None) if plain else TorchAoFp8Linear()
        if plain or not found.symmetric or found.inputs_per_scale is not None:
            return TorchAoLinear(found)
        return TorchAoInt8Linear(found)
