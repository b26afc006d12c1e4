"""Linear layers that store int8 weights and compute in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import ConfigError
from interposer_ops.weight_only_linear import w8a16_linear

__all__ = ["W8A16Linear"]


class W8A16Linear(LinearMethod):
    """``weight`` ``[O, I]`` int8 with ``weight_scale`` ``[O, I / G]``.

    Scales are held in float32, which represents those of every checkpoint exactly, whatever the
    model's dtype.

    ``group_size`` is G, the number of inputs that share a scale; None means all of them.
    """

    def __init__(self, group_size: int | None = None) -> None:
        self.group_size = group_size

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, ``weight_scale`` and, if asked for, ``bias``.

        Raises: ConfigError: the groups do not divide the inputs.
        """
        group_size = self.group_size or in_features
        num_groups, rest = divmod(in_features, group_size)
        if rest:
            raise ConfigError(
                f"{site.prefix}: groups of {group_size} do not divide its {in_features} inputs. "
                "Try: quantize with a group size that does, or leave the layer plain"
            )
        self.bound = site.bind_kernel(
            w8a16_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=group_size,
            num_groups=num_groups,
            asymmetric=False,
        )
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        scale = torch.empty(out_features, num_groups, dtype=torch.float32)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        for name, tensor in (("weight", weight), ("weight_scale", scale), ("bias", offset)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, parameter)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times the scale of its group."""
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        inputs_per_scale = weight.shape[1] // scale.shape[1]
        return weight.double() * scale.double().repeat_interleave(inputs_per_scale, 1)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants, prepared if it wants them so."""
        names = {"weight": "weight", "scale": "weight_scale", "bias": "bias"}
        stored = {operand: layer._parameters[name] for operand, name in names.items()}
        prepared = self.bound.prepared(**stored, zero_points=None)
        for operand, name in names.items():
            if prepared[operand] is not stored[operand]:
                # The prepared copy replaces it; held twice it would double the memory.
                layer.register_parameter(name, None)
        return self.bound.function, tuple(prepared[operand] for operand in (*names, "zero_points"))
