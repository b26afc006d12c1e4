"""Routed experts whose matrices are blocks of GGUF files.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_gguf._block_formats import BlockFormat
from interposer_gguf._cases import random_rows
from interposer_gguf._products import check_blocks, not_numbers_of, parameter
from interposer_ops.layers.expert_loop import LinearExperts
from interposer_ops.layers.experts import PlainExperts

_HOST = "cpu"


class BlocksExperts(ExpertsMethod):
    """Linear layers of blocks on a host, matrices that are dequantized while they load elsewhere.

    Kernels for blocks are for hosts, which have little memory bandwidth; an accelerator computes
    all experts at once, in graphs.

    Args:
        formats: by the names of linear layers.
    """

    def __init__(self, formats: Mapping[str, BlockFormat]) -> None:
        self.formats = formats

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register what the method for this device registers.

        Raises: ConfigError: blocks do not divide the inputs, or matrices are stored together.
        """
        device = torch.device(site.resolver.device.torch_device).type
        self.method: ExpertsMethod = LinearExperts()
        if device != _HOST:
            self.method = DequantizedExperts(self.formats)
        self.method.create_weights(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``, if known."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return what the method for this device returns.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        return self.method.finalize(layer)


class DequantizedExperts(ExpertsMethod):
    """Blocks ``[E, outputs, row]`` uint8 of each kind of matrix, dequantized by ``finalize``.

    A file stores those of all experts as one tensor, so they are of one format.
    """

    def __init__(self, formats: Mapping[str, BlockFormat]) -> None:
        self.formats = formats

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register a parameter for gates, for what they act on and for the second projection.

        Raises: ConfigError: blocks do not divide the inputs.
        """
        assert spec.projections is not None, "files name the matrices of each expert"
        self.prefix, self.dtype, self.spec = site.prefix, site.dtype, spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        self.kinds = {
            part: (self.formats.get(f"{site.prefix}.0.{part}"), *shape)
            for part, shape in zip(spec.projections, shapes, strict=True)
        }
        self.plain = PlainExperts()
        # Its matrices come later.
        with torch.device("meta"):
            self.plain.create_weights(nn.Module(), site, spec)
        for part, (layout, rows, inputs) in self.kinds.items():
            stored = torch.empty(spec.num_experts, rows, inputs, dtype=site.dtype)
            attributes: dict[str, Any] = {"expert_parts": {part: rows}}
            if layout is not None:
                check_blocks(layout, site, inputs)
                shape = spec.num_experts, rows, layout.row_bytes(inputs)
                stored = torch.empty(shape, dtype=torch.uint8)
                attributes |= {"expert_tensor": layout.name, "sample": _sampler(layout, shape)}
            layer.register_parameter(part, parameter(stored, **attributes))

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        gate, up, down = (
            layer.get_parameter(part).double()
            if layout is None
            else layout.dequantized(layer.get_parameter(part).data, torch.float64)
            for part, (layout, _, _) in self.kinds.items()
        )
        return torch.cat((gate, up), 1), down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the kernel of plain experts with the dequantized matrices, held once.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        spec, device = self.spec, next(layer.parameters()).device
        count, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
        form: Any = {"dtype": self.dtype, "device": device}
        gate_up = torch.empty(count, 2 * inner, hidden, **form)
        down = torch.empty(count, hidden, inner, **form)
        places = gate_up[:, :inner], gate_up[:, inner:], down
        for (part, (layout, _, _)), place in zip(self.kinds.items(), places, strict=True):
            stored = layer.get_parameter(part).data
            layer.register_parameter(part, None)
            for expert, rows in enumerate(stored):
                numbers = rows if layout is None else layout.dequantized(rows, torch.float32)
                if not numbers.isfinite().all():
                    name = "weight" if layout is None else layout.name
                    raise not_numbers_of(f"{self.prefix}.{expert}.{part}.{name}")
                place[expert] = numbers
        for name, matrices in (("gate_up_proj", gate_up), ("down_proj", down)):
            layer.register_parameter(name, parameter(matrices))
            layer.register_parameter(f"{name}_bias", None)
        return self.plain.finalize(layer)


def _sampler(
    layout: BlockFormat, shape: tuple[int, int, int]
) -> Callable[[torch.Generator], torch.Tensor]:
    """Return a sampler of rows whose scales are numbers."""
    count, rows, num_bytes = shape

    def sample(generator: torch.Generator) -> torch.Tensor:
        width = layout.row_numbers(num_bytes)
        return random_rows(layout, count * rows, width, generator).view(shape)

    return sample
