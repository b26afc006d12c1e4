"""Scheme of bitsandbytes checkpoints, as transformers writes them."""

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
    """Scheme of NF4 and FP4, with or without double quantization, and of LLM.int8()."""

    method = "bitsandbytes"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> BitsAndBytes:
        """Create the scheme from a ``quantization_config``.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the message lists
            the supported settings.
        """
        return cls(Settings.parse(settings))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it unquantized.

        Raises: ConfigError: only some of the layers that are fused at ``prefix`` are skipped.
        """
        mend = "name all of them in llm_int8_skip_modules when quantizing, or none"
        storage = stored_alike(prefix, parts, self.settings.weights, mend)
        if storage is None:
            return None
        return FourBitLinear(storage) if isinstance(storage, FourBit) else EightBitLinear()

    def restored(
        self, tensors: Iterator[tuple[str, torch.Tensor]], places: Container[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, with packed experts and routers dequantized.

        Raises: CheckpointError: tensors of a packed weight are missing or contradict each other.
        """
        return restored_weights(self.settings, tensors, places)
