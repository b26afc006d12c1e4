"""Routed experts of checkpoints that store each matrix as a separate tensor.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from interposer import ExpertsSpec, Site
from interposer.errors import CheckpointError
from interposer_ops.layers.moe.sequential_experts import separate_projections
from interposer_quantization._weights.packed_linear import register_stored


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the two matmuls of every expert: gate and up, or down.

    Attributes:
        name: prefix of the parameter names.
        parts: the checkpoint's names of the matrices, the gate first.
        outputs: number of outputs of each matrix.
    """

    name: str
    parts: tuple[str, ...]
    outputs: int
    inputs: int

    @property
    def all_outputs(self) -> int:
        """Return the number of outputs of gate and up, or of down."""
        return len(self.parts) * self.outputs

    def register(
        self,
        layer: nn.Module,
        stored: str,
        tensor: torch.Tensor,
        sample: Callable[[torch.Generator], torch.Tensor] | None = None,
    ) -> None:
        """Register the parameter for the checkpoint tensor ``stored`` of all experts, ``[E, ...]``.

        The matrices follow each other along dimension 1 and have the same number of rows.
        """
        sizes = {part: tensor.shape[1] // len(self.parts) for part in self.parts}
        # The loader uses these attributes to place each expert's tensors.
        attributes: dict[str, object] = {"expert_parts": sizes, "expert_tensor": stored}
        if sample is not None:
            attributes["sample"] = sample
        register_stored(layer, f"{self.name}_{stored}", tensor, **attributes)

    def pop(self, layer: nn.Module, stored: str) -> torch.Tensor:
        """Unregister the parameter of the checkpoint tensor ``stored``, and return the data."""
        tensor = layer.get_parameter(f"{self.name}_{stored}").data
        layer.register_parameter(f"{self.name}_{stored}", None)
        return tensor

    def tensor_name(self, prefix: str, expert: int, row: int, rows: int, stored: str) -> str:
        """Return the checkpoint's name of the tensor that holds row ``row`` of ``rows``."""
        return f"{prefix}.{expert}.{self.parts[row * len(self.parts) // rows]}.{stored}"


def projections_of(site: Site, spec: ExpertsSpec) -> tuple[Projection, Projection]:
    """Return the gate-up and the down projection of experts with separately stored matrices.

    Raises: ConfigError: one tensor holds the matrices of all experts, or they have biases.
    """
    gate, up, down = separate_projections(site, spec)
    return (
        Projection("gate_up", (gate, up), spec.intermediate_size, spec.hidden_size),
        Projection("down", (down,), spec.hidden_size, spec.intermediate_size),
    )


def matrix_names(prefix: str, spec: ExpertsSpec) -> list[str]:
    """Return the checkpoint's names of all matrices; empty if one tensor holds all experts."""
    parts = spec.projections or ()
    return [f"{prefix}.{expert}.{part}" for expert in range(spec.num_experts) for part in parts]


def check_scales(
    projection: Projection, prefix: str, stored: str, scales: torch.Tensor
) -> torch.Tensor:
    """Return the scales ``[E, R, ...]``; raise CheckpointError if a scale is zero or not finite.

    Raises: CheckpointError: a scale is zero or not finite.
    """
    is_wrong = ~scales.isfinite() | (scales == 0)
    if is_wrong.any():
        expert, row = (int(index) for index in is_wrong.nonzero()[0][:2])
        raise CheckpointError(
            projection.tensor_name(prefix, expert, row, scales.shape[1], stored),
            f"holds {int(is_wrong[expert].sum())} scales that are zero, infinite or not a number",
            "copy the checkpoint again, or quantize again",
        )
    return scales
