"""Routed experts of int4 matrices packed into int32, as in compressed-tensors.

Dimensions: E experts, H hidden size, I intermediate size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.experts import fused_experts_w4a16
from interposer_quantization._compressed_tensors.bits import count_words, unpack_bits
from interposer_quantization._compressed_tensors.parameters import count_groups
from interposer_quantization._experts.separate import Projection, check_scales, projections_of
from interposer_quantization._weights.int_packing import to_kernel_layout

_BITS, _MIDDLE = 4, 8


class Int4Experts(ExpertsMethod):
    """Experts method for ``weight_packed`` int32, ``weight_scale`` and ``weight_shape`` per matrix.

    Quantization is symmetric. Scales are rounded to the model's dtype, which the op takes.

    Args:
        group_size: inputs that share a scale.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register packed weights, scales and shapes of all experts.

        Raises: ConfigError: groups do not divide the inputs, the number of inputs is odd, or one
            tensor holds the matrices of all experts.
        """
        self.prefix, self.dtype = site.prefix, site.dtype
        self.projections = projections_of(site, spec)
        self.bound = site.bind_kernel(
            fused_experts_w4a16,
            **{name: value for name, value in spec.dims().items() if name != "biased"},
            group_size=self.group_size,
        )
        for projection in self.projections:
            count, rows, inputs = spec.num_experts, projection.all_outputs, projection.inputs
            groups = count_groups(site, inputs, self.group_size)
            if inputs % 2:
                raise ConfigError(
                    f"{site.prefix}: rows of {inputs} numbers of 4 bits do not fill bytes. "
                    "Try: leave the experts plain"
                )
            words = torch.empty(count, rows, count_words(inputs, _BITS), dtype=torch.int32)
            projection.register(layer, "weight_packed", words)
            scales = torch.empty(count, rows, groups, dtype=torch.float32)
            projection.register(layer, "weight_scale", scales)
            # On the CPU explicitly: the default device may be meta, and the sampler needs values.
            sizes = torch.tensor([projection.outputs, inputs], device="cpu")
            sizes = sizes.repeat(len(projection.parts))
            shapes = torch.empty(count, len(sizes), dtype=torch.int64)
            projection.register(layer, "weight_shape", shapes, _sizes_sampler(sizes, count))

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices: (quantized value - midpoint) * scale."""
        gate_up, down = (self._dequantize(layer, projection) for projection in self.projections)
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Repack the weights once for the kernel; return the kernel and constants.

        Raises: CheckpointError: a scale is zero or not finite, or a stored shape is wrong.
        """
        constants: dict[str, torch.Tensor] = {}
        for projection in self.projections:
            self._check_shapes(projection, projection.pop(layer, "weight_shape"))
            scales = projection.pop(layer, "weight_scale")
            check_scales(projection, self.prefix, "weight_scale", scales)
            words, inputs = projection.pop(layer, "weight_packed"), projection.inputs
            quantized = torch.empty(
                *words.shape[:2], inputs // 2, dtype=torch.uint8, device=words.device
            )
            # Expert by expert, so that only one expert's weights are unpacked at a time.
            for expert, packed in enumerate(words):
                quantized[expert] = to_kernel_layout(unpack_bits(packed, _BITS, inputs), _BITS)
            constants[projection.name] = quantized
            constants[f"{projection.name}_scale"] = scales.to(self.dtype)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _dequantize(self, layer: nn.Module, projection: Projection) -> torch.Tensor:
        words = layer.get_parameter(f"{projection.name}_weight_packed").data
        scales = layer.get_parameter(f"{projection.name}_weight_scale").data
        quantized = unpack_bits(words.flatten(0, 1), _BITS, projection.inputs).double() - _MIDDLE
        grouped = quantized.unflatten(-1, (scales.shape[-1], -1)).unflatten(0, words.shape[:2])
        # The op takes scales in the model's dtype.
        matrices: torch.Tensor = (grouped * scales.to(self.dtype).double()[..., None]).flatten(-2)
        return matrices

    def _check_shapes(self, projection: Projection, shapes: torch.Tensor) -> None:
        expected = [projection.outputs, projection.inputs]
        for expert, row in enumerate(shapes.view(len(shapes), -1, 2).tolist()):
            for part, stored_shape in zip(projection.parts, row, strict=True):
                if stored_shape != expected:
                    raise CheckpointError(
                        f"{self.prefix}.{expert}.{part}.weight_shape",
                        f"holds {stored_shape}, the config asks for {expected}",
                        "copy config.json and the weights of one checkpoint",
                    )


def _sizes_sampler(sizes: torch.Tensor, count: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Return a sampler of ``weight_shape`` that gives every expert the same sizes."""

    def sample(_: torch.Generator) -> torch.Tensor:
        return sizes.expand(count, -1)

    return sample
