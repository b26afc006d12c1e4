"""Linear layers that first multiply each input feature by a stored scale.

Dimensions: I input features, P fused layers.

Source: ``pre_quant_scale`` of NVIDIA ModelOpt 0.47, with which AWQ moves magnitude from inputs to
weights. A checkpoint lacks the tensor if the exporter folded the scale into the preceding layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._weights.packed_linear import register_stored

_NAME = "pre_quant_scale"


class ScaledInputLinear(LinearMethod):
    """Linear method that scales inputs by ``pre_quant_scale`` and delegates to ``method``.

    ``pre_quant_scale`` is ``[I]`` per fused layer, and 1 if it is not stored. Fused layers share
    one input, so the values of all must be equal.

    Attributes:
        method: linear method that receives the scaled input.
    """

    parts_agree = True

    def __init__(self, method: LinearMethod) -> None:
        self.method = method

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``pre_quant_scale`` ``[P * I]`` and the parameters of ``method``.

        Raises: ConfigError: ``method`` does not support the layer's sizes.
        """
        self.method.create_weights(layer, site, in_features, out_features, bias)
        self.members = Members(layer, site, out_features)
        num_parts = len(self.members.sizes)

        def sample(generator: torch.Generator) -> torch.Tensor:
            return (torch.rand(in_features, generator=generator) + 0.5).repeat(num_parts)

        scales = torch.empty(num_parts * in_features, dtype=torch.float32)
        register_stored(layer, _NAME, scales, per_part=True, default=1.0, sample=sample)

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the float64 weight ``[O, I]`` of ``method``."""
        return self.method.dequantized(layer)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``, scaled and then quantized by ``method``."""
        return self.method.dequantized_input(layer, _scaled(x, self._by_member(layer)[0]))

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the kernel of ``method``, preceded by the scaling unless all scales are 1.

        Raises: CheckpointError: a scale is not positive, or the scales of fused layers differ.
        """
        scales = self._by_member(layer)
        self.members.check(scales, _NAME)
        self._check_equal(scales)
        # scales still refers to the data.
        layer.register_parameter(_NAME, None)
        kernel, operands = self.method.finalize(layer)
        if (scales == 1).all():
            return kernel, operands
        # clone() releases the memory of the other fused layers' scales.
        return partial(_matmul_scaled_input, kernel), (scales[0].clone(), *operands)

    def _by_member(self, layer: nn.Module) -> torch.Tensor:
        """Return the scales of each fused layer, ``[P, I]``."""
        return layer.get_parameter(_NAME).data.view(len(self.members.sizes), -1)

    def _check_equal(self, scales: torch.Tensor) -> None:
        first, *other_members = self.members.sizes
        for member, member_scales in zip(other_members, scales[1:], strict=True):
            if not torch.equal(member_scales, scales[0]):
                raise CheckpointError(
                    self.members.tensor(member, _NAME),
                    f"differs from {self.members.tensor(first, _NAME)}, but fused layers must have "
                    f"the same {_NAME}; a layer that stores none has 1",
                    "export the model with a release of ModelOpt that makes them equal",
                )


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply each feature of ``x`` by the feature's scale; round once to the dtype of ``x``."""
    return (x * scale).to(x.dtype)


def _matmul_scaled_input(
    kernel: Callable[..., torch.Tensor], x: torch.Tensor, scale: torch.Tensor, *operands: Any
) -> torch.Tensor:
    return kernel(_scaled(x, scale), *operands)
