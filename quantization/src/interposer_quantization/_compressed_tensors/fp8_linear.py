"""Linear layers of FP8 weights that are dequantized while loading.

Used for unquantized inputs, and for input formats that no op combines with FP8 weights.
Dimensions: I input features, O output features, G groups, P fused layers; R rows and C columns of a
block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.linear import linear
from interposer_ops.quantizers import decode_e8m0
from interposer_quantization._compressed_tensors.exponents import (
    check_exponents,
    register_exponents,
)
from interposer_quantization._compressed_tensors.parameters import (
    count_groups,
    register_scales,
    scales_by_output,
)
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, check_block_rows, register

_DEQUANTIZED = "weights of 8-bit floats are dequantized once, while loading: no op multiplies them"


class Fp8WeightLinear(WeightLinear):
    """Linear method for ``weight`` ``[O, I]`` float8_e4m3fn that is dequantized by ``finalize``.

    No op multiplies FP8 weights by inputs in another format. ``finalize`` therefore converts the
    weights to the model's dtype, which takes the memory of an unquantized layer.

    Args:
        exponents: scales are stored as E8M0 exponents.
        weight, scale: names of the parameters.
        spread: scales of R by C blocks are stored as ``[R, 1, C, 1]``.
    """

    def __init__(
        self,
        weights: Weights,
        inputs: Inputs | None,
        exponents: bool = False,
        *,
        weight: str = "weight",
        scale: str = "weight_scale",
        spread: bool = False,
    ) -> None:
        super().__init__(inputs)
        self.weights = weights
        self.exponents = exponents
        self.weight, self.scale = weight, scale
        self.spread = spread

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register ``weight`` and ``weight_scale``, and bind the kernel for unquantized weights.

        Raises: ConfigError: groups do not divide the inputs, or a block crosses two fused layers.
        """
        register(layer, **{self.weight: torch.empty(out_features, in_features, dtype=FORMAT)})
        strategy, size = self.weights.strategy, self.weights.inputs_per_scale
        if self.exponents:
            num_groups = count_groups(site, in_features, size or in_features)
            register_exponents(layer, self.scale, out_features, num_groups)
        elif strategy == "block":
            self._register_blocks(layer, site, in_features)
        elif strategy == "tensor":
            register_scales(layer, self.scale, self.members, None)
        else:
            columns = count_groups(site, in_features, size or in_features)
            register_scales(layer, self.scale, self.members, columns)
        sizes = {"in_features": in_features, "out_features": out_features}
        bound_kernel = site.bind_kernel(linear, **sizes, biased=bias)
        # Reports show the note, because the layer takes more memory than its checkpoint.
        annotate_place(site, _DEQUANTIZED, op=linear.name)
        return bound_kernel

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the weight ``[O, I]``, dequantized to the model's dtype, as float64."""
        return self._plain(layer).double()

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the weight, dequantized to the model's dtype.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter(self.scale)
        if self.exponents:
            check_exponents(self.members, scales, self.scale)
        else:
            self.members.check(scales, self.scale)
        return {"weight": self._plain(layer)}

    def _plain(self, layer: nn.Module) -> torch.Tensor:
        weight, parameter = layer.get_parameter(self.weight), layer.get_parameter(self.scale)
        # Drop the two dimensions of size 1.
        stored = parameter[:, 0, :, 0] if self.spread else parameter.data
        decoded = decode_e8m0(stored, torch.float32) if self.exponents else stored
        scales = scales_by_output(decoded, self.members)
        if self.weights.strategy == "block":
            rows, columns = self.weights.size or (1, 1)
            scales = scales.repeat_interleave(rows, 0)[: len(weight)]
            scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
            return (weight.float() * scales).to(self.dtype)
        grouped = weight.float().unflatten(1, (scales.shape[1], -1))
        plain: torch.Tensor = (grouped * scales.unsqueeze(-1)).flatten(1).to(self.dtype)
        return plain

    def _register_blocks(self, layer: nn.Module, site: Site, in_features: int) -> None:
        rows, columns = self.weights.size or (1, 1)
        check_block_rows(site, self.members, rows)
        shape = -(-sum(self.members.sizes.values()) // rows), -(-in_features // columns)
        spread = (shape[0], 1, shape[1], 1) if self.spread else shape
        register(layer, **{self.scale: torch.empty(spread, dtype=torch.float32)})
