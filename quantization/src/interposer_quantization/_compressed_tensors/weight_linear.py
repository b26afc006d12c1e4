"""Linear layers that multiply narrower weights in the model's dtype.

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
from interposer_quantization._compressed_tensors.inputs import bound_rounding
from interposer_quantization._compressed_tensors.parameters import final_operands
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import Members, register
from interposer_quantization._weights.weight_only import product_of_sorted


class WeightLinear(LinearMethod):
    """The product of inputs, as they are or rounded, and weights that an op of floats takes.

    Args:
        inputs: what inputs are rounded to first; None leaves them as they are.
    """

    def __init__(self, inputs: Inputs | None) -> None:
        self.inputs = inputs

    @abstractmethod
    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register everything but the bias, and return the kernel to call.

        Raises: ConfigError: the sizes are not such that they can be stored so.
        """

    @abstractmethod
    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the op's constants by name, in the order of its parameters, without the bias.

        Raises: CheckpointError: a tensor holds what no weight can be computed with.
        """

    def order(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the input ``[I]`` that each input of the weight multiplies, None if in order."""
        return None

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register what is stored and, if asked for, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self.round_input = (
            None if self.inputs is None else bound_rounding(self.inputs, site, in_features)
        )
        self.bound = self.create_stored(layer, site, in_features, out_features, bias)
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``, rounded if inputs are."""
        return (x if self.round_input is None else self.round_input(x)).double()

    def dequantizable(self) -> Verdict:
        """Accept where inputs are not rounded."""
        if self.round_input is not None:
            return Verdict.refuse("inputs are rounded as the checkpoint says")
        return Verdict.accept()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel, after what is done with its input, with its constants.

        Raises: CheckpointError: a tensor holds what no weight can be computed with.
        """
        order = self.order(layer)
        constants = self.constants(layer)
        names = list(constants)
        # Of all these ops the bias is the third constant, or the last one.
        names.insert(2, "bias")
        constants["bias"] = layer._parameters["bias"]
        ordered = {name: constants[name] for name in names}
        del constants
        operands = final_operands(layer, self.bound, ordered)
        kernel: Callable[..., torch.Tensor] = self.bound.function
        if order is not None:
            kernel, operands = partial(product_of_sorted, kernel), (order, *operands)
        if self.round_input is not None:
            kernel = partial(_product_of_rounded, self.round_input, kernel)
        return kernel, operands


def _product_of_rounded(
    round_input: Callable[[torch.Tensor], torch.Tensor],
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *operands: Any,
) -> torch.Tensor:
    return kernel(round_input(x), *operands)
