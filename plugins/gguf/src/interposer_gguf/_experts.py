"""Routed experts with matrices in GGUF blocks.

Shapes: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_gguf._block_formats import BlockFormat
from interposer_gguf._cases import random_rows
from interposer_gguf._matmuls import check_blocks, not_finite_tensor_error, parameter
from interposer_ops.layers.moe.experts import PlainExperts
from interposer_ops.layers.moe.sequential_experts import LinearExperts

_HOST = "cpu"


class BlocksExperts(ExpertsMethod):
    """Experts method for GGUF blocks: kept on CPUs, dequantized on accelerators.

    On a CPU, memory bandwidth limits the speed, and kernels read blocks. An accelerator computes
    all experts in one kernel, which graphs can capture, from unquantized matrices.

    Args:
        formats: block formats by names of linear layers.
    """

    def __init__(self, formats: Mapping[str, BlockFormat]) -> None:
        self.formats = formats

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the parameters of the experts method for this device.

        Raises: ConfigError: the block size does not divide the input features, or the matrices of
            all experts are stacked.
        """
        device = torch.device(site.resolver.device.torch_device).type
        self.method: ExpertsMethod = LinearExperts()
        if device != _HOST:
            self.method = DequantizedExperts(self.formats)
        self.method.create_weights(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``, or None."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the kernel and operands of the experts method for this device.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        return self.method.finalize(layer)


class DequantizedExperts(ExpertsMethod):
    """Experts in blocks ``[E, outputs, row]`` uint8 that ``finalize`` dequantizes.

    A file stores one kind of matrix of all experts as one tensor in one format.
    """

    def __init__(self, formats: Mapping[str, BlockFormat]) -> None:
        self.formats = formats

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register a parameter each for the gate, up and down projections.

        Raises: ConfigError: the block size does not divide the input features.
        """
        assert spec.projections is not None, "files name the matrices of each expert"
        self.prefix, self.dtype, self.spec = site.prefix, site.dtype, spec
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        shapes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
        self.projections = {
            part: (self.formats.get(f"{site.prefix}.0.{part}"), *shape)
            for part, shape in zip(spec.projections, shapes, strict=True)
        }
        self.unquantized = PlainExperts()
        # ``finalize`` registers the matrices of this method.
        with torch.device("meta"):
            self.unquantized.create_weights(nn.Module(), site, spec)
        for part, (layout, rows, inputs) in self.projections.items():
            stored = torch.empty(spec.num_experts, rows, inputs, dtype=site.dtype)
            attributes: dict[str, Any] = {"expert_parts": {part: rows}}
            if layout is not None:
                check_blocks(layout, site, inputs)
                shape = spec.num_experts, rows, layout.row_bytes(inputs)
                stored = torch.empty(shape, dtype=torch.uint8)
                attributes |= {"expert_tensor": layout.name, "sample": _sampler(layout, shape)}
            layer.register_parameter(part, parameter(stored, **attributes))

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        gate, up, down = (
            layer.get_parameter(part).double()
            if layout is None
            else layout.dequantized(layer.get_parameter(part).data, torch.float64)
            for part, (layout, _, _) in self.projections.items()
        )
        return torch.cat((gate, up), 1), down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Dequantize the matrices and return the kernel of unquantized experts.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        spec, device = self.spec, next(layer.parameters()).device
        count, hidden, intermediate = spec.num_experts, spec.hidden_size, spec.intermediate_size
        options: Any = {"dtype": self.dtype, "device": device}
        gate_up = torch.empty(count, 2 * intermediate, hidden, **options)
        down = torch.empty(count, hidden, intermediate, **options)
        targets = gate_up[:, :intermediate], gate_up[:, intermediate:], down
        for (part, (layout, _, _)), target in zip(self.projections.items(), targets, strict=True):
            stored = layer.get_parameter(part).data
            layer.register_parameter(part, None)
            # Expert by expert: at any time, only one expert is in memory as float32.
            for expert, rows in enumerate(stored):
                values = rows if layout is None else layout.dequantized(rows, torch.float32)
                if not values.isfinite().all():
                    name = "weight" if layout is None else layout.name
                    raise not_finite_tensor_error(f"{self.prefix}.{expert}.{part}.{name}")
                target[expert] = values
        for name, matrices in (("gate_up_proj", gate_up), ("down_proj", down)):
            layer.register_parameter(name, parameter(matrices))
            layer.register_parameter(f"{name}_bias", None)
        return self.unquantized.finalize(layer)


def _sampler(
    layout: BlockFormat, shape: tuple[int, int, int]
) -> Callable[[torch.Generator], torch.Tensor]:
    """Return a function that draws random rows with finite scales."""
    count, rows, num_bytes = shape

    def sample(generator: torch.Generator) -> torch.Tensor:
        width = layout.row_numbers(num_bytes)
        return random_rows(layout, count * rows, width, generator).view(shape)

    return sample
