"""A linear layer whose plain weight is quantized when it is finalized.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site, Verdict
from interposer.errors import CheckpointError
from interposer_quantization._fp8.parameters import Members, register, register_passing

Quantize = Callable[[torch.Tensor, Sequence[int]], Mapping[str, torch.Tensor]]
"""A weight ``[O, I]`` and the outputs of each fused layer to what a checkpoint would hold."""


class OnlineLinear(LinearMethod):
    """``weight`` ``[O, I]`` in the model's dtype, which is quantized and dropped by ``finalize``.

    Attributes:
        method: of the layer that holds the quantized weight.
    """

    def __init__(self, method: LinearMethod, quantize: Quantize) -> None:
        self.method = method
        self.quantize = quantize

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight`` and, if asked for, ``bias``, as plain checkpoints have them.

        Raises: ConfigError: what ``method`` cannot hold.
        """
        self.method.create_weights(layer, site, in_features, out_features, bias)
        self.members = Members(layer, site, out_features)
        held = {name: None for name in layer._parameters if name != "bias"}
        weight = torch.empty(out_features, in_features, dtype=site.dtype)
        register(layer, **held)
        register_passing(layer, "weight", weight)

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the float64 weight ``[O, I]`` that the codes and scales of ``weight`` mean."""
        return self.method.dequantized(self._quantized(layer))

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times its scale."""
        return self.method.dequantized_input(layer, x)

    def dequantizable(self) -> Verdict:
        """Refuse: whoever asks for quantized weights is not to get plain ones."""
        return Verdict.refuse("the weights were plain, and are quantized on request")

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return kernel and constants of the layer with the quantized weight.

        Raises: CheckpointError: the weight holds what is no finite number.
        """
        quantized = self._quantized(layer)
        layer.register_parameter("weight", None)
        layer._parameters.update(quantized._parameters)
        return self.method.finalize(layer)

    def _quantized(self, layer: nn.Module) -> nn.Module:
        """Return the parameters of a layer of ``method``."""
        quantized = nn.Module()
        register(quantized, **self._tensors(layer.get_parameter("weight").data))
        return quantized

    def _tensors(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return what a layer of ``method`` holds of ``weight``."""
        self._check(weight)
        return self.quantize(weight, tuple(self.members.sizes.values()))

    def _check(self, weight: torch.Tensor) -> None:
        """Raise CheckpointError if a number is not finite, naming its tensor."""
        sizes = self.members.sizes
        for member, part in zip(sizes, weight.split(list(sizes.values())), strict=True):
            check_finite(part, self.members.tensor(member, "weight"))


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if the tensor ``name`` holds what cannot be quantized."""
    # NaN and infinities reach the extremes, which are found in a twentieth of the time.
    if all(bound.isfinite() for bound in weight.aminmax()):
        return
    wrong = weight[~weight.isfinite()]
    raise CheckpointError(
        name,
        f"holds {float(wrong[0])}, which no quantized number can stand for",
        "copy the checkpoint again",
    )
