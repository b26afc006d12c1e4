"""Linear layers with a quantized weight and a matmul in the model's dtype.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site, Verdict
from interposer_quantization._compressed_tensors.inputs import bind_fake_quantizer
from interposer_quantization._compressed_tensors.parameters import prepare_operands
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import Members, register
from interposer_quantization._weights.weight_only import matmul_sorted_inputs


class WeightLinear(LinearMethod):
    """Base of linear methods with a matmul in the model's dtype.

    Args:
        inputs: fake quantization of the inputs; None leaves the inputs unchanged.
    """

    def __init__(self, inputs: Inputs | None) -> None:
        self.inputs = inputs

    @abstractmethod
    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register all parameters except the bias, and bind the kernel.

        Raises: ConfigError: the format does not support the layer's sizes.
        """

    @abstractmethod
    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the op's constants by name, in parameter order, without the bias.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from.
        """

    def order(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the input permutation ``[I]`` of the weight, or None if there is none."""
        return None

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the stored parameters and, if requested, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self.fake_quantize_input = (
            None if self.inputs is None else bind_fake_quantizer(self.inputs, site, in_features)
        )
        self.bound = self.create_stored(layer, site, in_features, out_features, bias)
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``, fake-quantized if the format quantizes inputs."""
        return (x if self.fake_quantize_input is None else self.fake_quantize_input(x)).double()

    def dequantizable(self) -> Verdict:
        """Accept dequantization of the layer, unless inputs are fake-quantized."""
        if self.fake_quantize_input is not None:
            return Verdict.refuse("inputs are rounded as the checkpoint says")
        return Verdict.accept()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return kernel and constants; the kernel also permutes and fake-quantizes inputs.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from.
        """
        order = self.order(layer)
        constants = self.constants(layer)
        names = list(constants)
        # In all of these ops the bias is the third constant, or the last if there are only two.
        names.insert(2, "bias")
        constants["bias"] = layer._parameters["bias"]
        # Kernels take their constants by position, so the order of the dict matters.
        ordered = {name: constants[name] for name in names}
        del constants
        operands = prepare_operands(layer, self.bound, ordered)
        kernel: Callable[..., torch.Tensor] = self.bound.function
        if order is not None:
            kernel, operands = partial(matmul_sorted_inputs, kernel), (order, *operands)
        if self.fake_quantize_input is not None:
            kernel = partial(_matmul_fake_quantized_input, self.fake_quantize_input, kernel)
        return kernel, operands


def _matmul_fake_quantized_input(
    fake_quantize_input: Callable[[torch.Tensor], torch.Tensor],
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *operands: Any,
) -> torch.Tensor:
    return kernel(fake_quantize_input(x), *operands)
