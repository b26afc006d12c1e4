"""Linear layer whose float weight ``finalize`` quantizes.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site, Verdict
from interposer.errors import CheckpointError
from interposer_quantization._fp8.parameters import Members, register, register_transient

Quantize = Callable[[torch.Tensor, Sequence[int]], Mapping[str, torch.Tensor]]
"""Function from a weight ``[O, I]`` and each fused layer's number of outputs to the parameters of
the quantized layer."""


class OnlineLinear(LinearMethod):
    """Linear method for a float ``weight`` ``[O, I]`` that ``finalize`` quantizes and frees.

    Attributes:
        method: linear method of the quantized weight.
    """

    quantizes_plain_weights = True

    def __init__(self, method: LinearMethod, quantize: Quantize) -> None:
        self.method = method
        self.quantize = quantize

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register float ``weight`` and, if requested, ``bias``, as unquantized checkpoints do.

        Raises: ConfigError: ``method`` does not support the layer's sizes.
        """
        self.method.create_weights(layer, site, in_features, out_features, bias)
        self.members = Members(layer, site, out_features)
        # The parameters of ``method`` are replaced by the plain weight until ``finalize``.
        unregistered = {name: None for name in layer._parameters if name != "bias"}
        weight = torch.empty(out_features, in_features, dtype=site.dtype)
        register(layer, **unregistered)
        register_transient(layer, "weight", weight)

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the quantized and dequantized ``weight`` ``[O, I]`` in float64."""
        return self.method.dequantized(self._quantized(layer))

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: quantized value * scale."""
        return self.method.dequantized_input(layer, x)

    def dequantizable(self) -> Verdict:
        """Refuse dequantization: the user requested quantized weights."""
        return Verdict.refuse("the weights were plain, and are quantized on request")

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Quantize the weight; return the kernel and constants of the quantized layer.

        Raises: CheckpointError: the weight has a value that is not finite.
        """
        quantized = self._quantized(layer)
        layer.register_parameter("weight", None)
        layer._parameters.update(quantized._parameters)
        return self.method.finalize(layer)

    def _quantized(self, layer: nn.Module) -> nn.Module:
        """Return a module that holds the quantized parameters of the layer."""
        quantized = nn.Module()
        register(quantized, **self._quantized_tensors(layer.get_parameter("weight").data))
        return quantized

    def _quantized_tensors(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Quantize ``weight`` to the tensors that ``method`` takes."""
        self._check(weight)
        return self.quantize(weight, tuple(self.members.sizes.values()))

    def _check(self, weight: torch.Tensor) -> None:
        """Raise CheckpointError with the tensor's name if a value is not finite."""
        sizes = self.members.sizes
        for member, part in zip(sizes, weight.split(list(sizes.values())), strict=True):
            check_finite(part, self.members.tensor(member, "weight"))


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if the tensor ``name`` has a value that is not finite."""
    # NaN and infinities propagate to the extremes, and aminmax takes a twentieth of the time.
    if all(extreme.isfinite() for extreme in weight.aminmax()):
        return
    invalid_values = weight[~weight.isfinite()]
    raise CheckpointError(
        name,
        f"holds {float(invalid_values[0])}, which cannot be quantized",
        "copy the checkpoint again",
    )
