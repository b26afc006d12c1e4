"""Checkpoints of 8-bit floats: those of transformers, DeepSeek and AutoFP8, and FBGEMM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer import ExpertsMethod, LinearMethod, QuantizationScheme
from interposer.errors import ConfigError
from interposer_quantization._experts.stored import StoredExperts
from interposer_quantization._fp8.block_linear import Fp8BlockLinear
from interposer_quantization._fp8.config import FbgemmSettings, Fp8Settings
from interposer_quantization._fp8.experts import Fp8Experts
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._weights.fused_layers import stored_alike

_MEND = "quantize all of them, or name all of them in 'modules_to_not_convert'"
_SAME_INPUT = "calibrate them on the same input, or quantize with activation_scheme 'dynamic'"


class Fp8(QuantizationScheme):
    """Weights with a scale per block or one for all, inputs quantized on the way."""

    method = "fp8"

    def __init__(self, settings: Fp8Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Fp8:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(Fp8Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: of the layers that are fused there only some are quantized.
        """
        if stored_alike(prefix, parts, self.settings.stored, _MEND) is None:
            return None
        weight_scale, input_scale = self.settings.scale_names
        if self.settings.weight_block_size is not None:
            rows, columns = self.settings.weight_block_size
            power_of_two = self.settings.scale_fmt == "ue8m0"
            return Fp8BlockLinear(rows, columns, power_of_two, weight_scale)
        static = self.settings.activation_scheme == "static"
        return Fp8TensorLinear(weight_scale, input_scale if static else None, mend=_SAME_INPUT)

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, which finds out if all are quantized."""
        return StoredExperts(self.settings.stored, self._experts, _MEND)

    def _experts(self, prefix: str, _: str) -> ExpertsMethod:
        settings = self.settings
        if settings.activation_scheme == "static":
            raise ConfigError(
                f"{prefix}: no op multiplies experts by inputs with scales that are stored. "
                "Try: quantize with activation_scheme 'dynamic', or leave the experts plain"
            )
        block = settings.weight_block_size
        return Fp8Experts(
            "tensor" if block is None else (block[0], block[1]), settings.scale_names[0]
        )


class FbgemmFp8(QuantizationScheme):
    """Weights with a scale per output, inputs quantized per token up to a bound."""

    method = "fbgemm_fp8"

    def __init__(self, settings: FbgemmSettings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> FbgemmFp8:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown or not supported; the text says what is.
        """
        return cls(FbgemmSettings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: of the layers that are fused there only some are quantized.
        """
        if stored_alike(prefix, parts, self.settings.stored, _MEND) is None:
            return None
        return Fp8RowLinear(self.settings.activation_scale_ub)
