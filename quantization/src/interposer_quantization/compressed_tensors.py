"""Checkpoints of the compressed-tensors library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer import LinearMethod, QuantizationScheme
from interposer.errors import ConfigError
from interposer_quantization.compressed_tensors_config import Settings
from interposer_quantization.w8a16 import W8A16Linear

__all__ = ["CompressedTensors"]


class CompressedTensors(QuantizationScheme):
    """Weight-only int8, symmetric, one scale per output or per group of inputs."""

    method = "compressed-tensors"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> CompressedTensors:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: layers that are fused there are stored in different ways.
        """
        parent = prefix.rpartition(".")[0]
        names = [f"{parent}.{part}" if parent else part for part in parts]
        weights = {name: self.settings.weights(name) for name in names}
        stored = {name: str(found or "not quantized") for name, found in weights.items()}
        if len(set(stored.values())) > 1:
            members = "\n".join(f"  {name}: {how}" for name, how in stored.items())
            raise ConfigError(
                f"{prefix} fuses layers that are quantized in different ways:\n{members}\n"
                "Try: quantize them alike, or name all of them in 'ignore'"
            )
        found = weights[names[0]]
        return W8A16Linear(found.inputs_per_scale) if found else None
