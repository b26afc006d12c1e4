"""Routed experts with FP8 matrices.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_ops.experts import fused_experts_fp8
from interposer_quantization._experts.separate import Projection, check_scales, projections_of
from interposer_quantization._fp8.parameters import FORMAT

Granularity = Literal["tensor", "channel"] | tuple[int, int]


class Fp8Experts(ExpertsMethod):
    """Experts method for float8_e4m3fn matrices with scales.

    Inputs stay in the model's dtype even if the checkpoint asks to quantize them: the op for
    experts does not quantize inputs, which is the more precise result.

    Args:
        granularity: one scale per matrix, per output, or per block of (outputs, inputs).
        scale_name: of the tensor with the scales.
        weight_name: of the tensor with the weights.
        spread: scales of R by C blocks are stored as ``[R, 1, C, 1]``.
    """

    def __init__(
        self,
        granularity: Granularity,
        scale_name: str,
        *,
        weight_name: str = "weight",
        spread: bool = False,
    ) -> None:
        self.granularity = granularity
        self.scale_name, self.weight_name = scale_name, weight_name
        self.spread = spread

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register weights and scales of all experts.

        Raises: ConfigError: the checkpoint stores the matrices of all experts in one tensor.
        """
        self.prefix = site.prefix
        self.projections = projections_of(site, spec)
        # Only block granularity has the dims block_rows and block_columns.
        blocks: dict[str, int] = {}
        if not isinstance(self.granularity, str):
            blocks = dict(zip(("block_rows", "block_columns"), self.granularity, strict=True))
        self.bound = site.bind_kernel(
            fused_experts_fp8,
            **{name: value for name, value in spec.dims().items() if name != "biased"},
            granularity="block" if blocks else str(self.granularity),
            weight_dtype=str(FORMAT).removeprefix("torch."),
            **blocks,
        )
        for projection in self.projections:
            rows, inputs = projection.all_outputs, projection.inputs
            weight = torch.empty(spec.num_experts, rows, inputs, dtype=FORMAT)
            projection.register(layer, self.weight_name, weight)
            shape = spec.num_experts, *self._scales(projection)
            projection.register(layer, self.scale_name, torch.empty(shape, dtype=torch.float32))

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices: quantized value * scale."""
        gate_up, down = (self._dequantize(layer, projection) for projection in self.projections)
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel and constants, and free the stored parameters.

        Raises: CheckpointError: a scale is zero or not finite.
        """
        constants: dict[str, torch.Tensor] = {}
        for projection in self.projections:
            constants[projection.name] = projection.pop(layer, self.weight_name)
            scales = projection.pop(layer, self.scale_name)
            check_scales(projection, self.prefix, self.scale_name, scales)
            constants[f"{projection.name}_scale"] = _with_block_dims(scales)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _scales(self, projection: Projection) -> tuple[int, ...]:
        """Return the shape of one expert's scales."""
        if self.granularity == "tensor":
            # One scale per matrix: gate and up have a scale each.
            return (len(projection.parts),)
        if self.granularity == "channel":
            return projection.all_outputs, 1
        assert not isinstance(self.granularity, str)
        rows, columns = self.granularity
        height, width = projection.all_outputs // rows, projection.inputs // columns
        return (height, 1, width, 1) if self.spread else (height, width)

    def _dequantize(self, layer: nn.Module, projection: Projection) -> torch.Tensor:
        weight = layer.get_parameter(f"{projection.name}_{self.weight_name}").double()
        scales = _with_block_dims(
            layer.get_parameter(f"{projection.name}_{self.scale_name}").double()
        )
        # Repeat each scale over the rows and columns of its block.
        for dim in (1, 2):
            scales = scales.repeat_interleave(weight.shape[dim] // scales.shape[dim], dim)
        return weight * scales


def fp8_block_experts(
    spec: ExpertsSpec, block: tuple[int, int], scale_name: str, *, spread: bool = False
) -> Fp8Experts | None:
    """Return the method for block scales, or None if a block does not divide a matrix."""
    sizes = spec.intermediate_size, spec.hidden_size
    if any(size % step for size in sizes for step in block):
        return None
    return Fp8Experts(block, scale_name, spread=spread)


def is_fused_op_requested(site: Site) -> bool:
    """Return whether a kernel rule of the user names the fused op.

    The op ignores the checkpoint's request to quantize inputs, so only an explicit rule selects it.
    """
    rules = site.resolver.config.kernels
    return any(rule.partition("@")[0] == fused_experts_fp8.name for rule in rules)


def _with_block_dims(scales: torch.Tensor) -> torch.Tensor:
    """Reshape scales to ``[E, R, C]``, with C = 1 for per-matrix and per-output scales."""
    if scales.ndim == 5:
        return scales.flatten(3).flatten(1, 2)
    # One scale per matrix: [E, parts] becomes [E, parts, 1].
    return scales if scales.ndim == 3 else scales.unsqueeze(-1)
