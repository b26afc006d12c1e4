"""Linear layers of int8 weights in LLM.int8() checkpoints.

Dimensions: I input features, O output features, P fused layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError
from interposer_nf4._parts import parts_of, register
from interposer_ops.quantized_linear import w8a16_linear

# Quantized magnitude of the largest weight of an output.
_LARGEST = 127


class EightBitLinear(LinearMethod):
    """Linear method for ``weight`` ``[O, I]`` int8, ``SCB`` ``[O]`` and ``weight_format`` ``[P]``.

    weight = int8 value * SCB / 127. bitsandbytes also quantizes inputs to int8, except outliers.
    Here inputs stay in the model's dtype, so results are closer to the original model.

    Source: LLM.int8(), arXiv:2208.07339, section 2.1.
    """

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the stored tensors and, if requested, ``bias``."""
        parent = site.prefix.rpartition(".")[0]
        self.parent = f"{parent}." if parent else ""
        self.parts = parts_of(layer, site, out_features)
        self.bound = site.bind_kernel(
            w8a16_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=in_features,
            num_groups=1,
            asymmetric=False,
            biased=bias,
        )
        register(layer, "weight", torch.empty(out_features, in_features, dtype=torch.int8))
        register(layer, "SCB", torch.empty(out_features, dtype=torch.float32))
        formats = torch.zeros(len(self.parts), dtype=torch.uint8)
        # Early releases store rows in order and no weight_format.
        register(layer, "weight_format", formats, chosen=formats, per_part=True, default=0)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register(layer, "bias", offset)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: int8 value * output scale."""
        return layer.get_parameter("weight").double() * self._scales(layer).double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with the constants that the kernel prepared.

        Raises: CheckpointError: rows are not stored in order, or a scale is invalid.
        """
        self._check(layer)
        weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
        prepared = self.bound.prepared(
            weight=weight, scale=self._scales(layer), bias=bias, zero_points=None
        )
        for name in ("SCB", "weight_format"):
            layer.register_parameter(name, None)
        for name, stored in (("weight", weight), ("bias", bias)):
            if prepared[name] is not stored:
                # Keeping the stored tensor next to the prepared copy would double the memory.
                layer.register_parameter(name, None)
        names = ("weight", "scale", "bias", "zero_points")
        return self.bound.function, tuple(prepared[name] for name in names)

    def _scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the weight's scales ``[O, 1]`` float32."""
        return scales_of(layer.get_parameter("SCB"))

    def _check(self, layer: nn.Module) -> None:
        formats = layer.get_parameter("weight_format").tolist()
        scales = layer.get_parameter("SCB").split(list(self.parts.values()))
        for part, weight_format, part_scales in zip(self.parts, formats, scales, strict=True):
            check_stored(f"{self.parent}{part}", weight_format, part_scales)


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """Convert ``SCB`` ``[O]``, the largest magnitude per output, to scales ``[O, 1]`` float32."""
    return (largest / _LARGEST).unsqueeze(1)


def check_stored(layer: str, form: int, scales: torch.Tensor) -> None:
    """Raise CheckpointError unless a layer's ``weight_format`` and ``SCB`` are valid.

    Raises: CheckpointError: rows are not stored in order, or a scale is negative or not finite.
    """
    if form:
        raise CheckpointError(
            f"{layer}.weight_format",
            f"is {form}, must be 0 for rows in order",
            "save the model again with a newer bitsandbytes, which stores rows in order",
        )
    is_wrong = ~(scales.isfinite() & (scales >= 0))
    if is_wrong.any():
        index = int(is_wrong.nonzero()[0])
        raise CheckpointError(
            f"{layer}.SCB",
            f"holds {int(is_wrong.sum())} scales that are negative, infinite or not a number, the "
            f"first one {float(scales[index])} for output {index}",
            "copy the checkpoint again, or quantize the model again",
        )
