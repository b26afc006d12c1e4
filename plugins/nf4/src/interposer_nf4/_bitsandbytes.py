"""Checkpoints of bitsandbytes, as transformers writes them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch

from interposer import LinearMethod, QuantizationScheme
from interposer_nf4._eight_bit import EightBitLinear
from interposer_nf4._four_bit import FourBitLinear
from interposer_nf4._restored_weights import restored_weights
from interposer_nf4._settings import FourBit, Settings
from interposer_quantization import stored_alike


class BitsAndBytes(QuantizationScheme):
    """NF4 and FP4 with or without double quantization, and LLM.int8()."""

    method = "bitsandbytes"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> BitsAndBytes:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: of layers that are fused there some are skipped, and some not.
        """
        mend = "name all of them in llm_int8_skip_modules when quantizing, or none"
        found = stored_alike(prefix, parts, self.settings.weights, mend)
        if found is None:
            return None
        return FourBitLinear(found) if isinstance(found, FourBit) else EightBitLinear()

    def restored(
        self, tensors: Iterator[tuple[str, torch.Tensor]], places: Container[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, dequantized where the model has a plain weight: experts, routers.

        Raises: CheckpointError: the tensors of such a weight contradict each other, or one lacks.
        """
        return restored_weights(self.settings, tensors, places)
