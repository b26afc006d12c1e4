"""Routed experts whose matrices are 8-bit floats with scales.

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
    """``weight`` float8_e4m3fn of every matrix, and its scales.

    Inputs are multiplied as they are, whatever the checkpoint says of rounding them: the op for
    experts does so, and loses less.

    Args:
        granularity: of scales: one for a matrix, for each output, or for blocks of so many outputs
            and inputs.
        scale_name: of the tensor with the scales.
        weight_name: of that with the weights.
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

        Raises: ConfigError: matrices are stored together.
        """
        self.prefix = site.prefix
        self.projections = projections_of(site, spec)
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
        """Return the float64 matrices: each number times its scale."""
        gate_up, down = (self._product(layer, projection) for projection in self.projections)
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants; what was stored is freed.

        Raises: CheckpointError: a scale is zero or not finite.
        """
        constants: dict[str, torch.Tensor] = {}
        for projection in self.projections:
            constants[projection.name] = projection.taken(layer, self.weight_name)
            scales = projection.taken(layer, self.scale_name)
            check_scales(projection, self.prefix, self.scale_name, scales)
            constants[f"{projection.name}_scale"] = _by_columns(scales)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _scales(self, projection: Projection) -> tuple[int, ...]:
        """Return the shape of the scales of one expert."""
        if self.granularity == "tensor":
            return (len(projection.parts),)
        if self.granularity == "channel":
            return projection.all_outputs, 1
        assert not isinstance(self.granularity, str)
        rows, columns = self.granularity
        height, width = projection.all_outputs // rows, projection.inputs // columns
        return (height, 1, width, 1) if self.spread else (height, width)

    def _product(self, layer: nn.Module, projection: Projection) -> torch.Tensor:
        weight = layer.get_parameter(f"{projection.name}_{self.weight_name}").double()
        scales = _by_columns(layer.get_parameter(f"{projection.name}_{self.scale_name}").double())
        for dim in (1, 2):
            scales = scales.repeat_interleave(weight.shape[dim] // scales.shape[dim], dim)
        return weight * scales


def fp8_blocks(
    spec: ExpertsSpec, block: tuple[int, int], scale_name: str, *, spread: bool = False
) -> Fp8Experts | None:
    """Return the method for blocks of so many rows and columns, None if they divide no matrices."""
    sizes = spec.intermediate_size, spec.hidden_size
    if any(size % step for size in sizes for step in block):
        return None
    return Fp8Experts(block, scale_name, spread=spread)


def is_asked_for(site: Site) -> bool:
    """Say whether a rule names the op, which takes inputs as they are where they may be rounded."""
    rules = site.resolver.config.kernels
    return any(rule.partition("@")[0] == fused_experts_fp8.name for rule in rules)


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    """Return ``[E, R, C]``, where one scale for a matrix has no columns, and others are spread."""
    if scales.ndim == 5:
        return scales.flatten(3).flatten(1, 2)
    return scales if scales.ndim == 3 else scales.unsqueeze(-1)
