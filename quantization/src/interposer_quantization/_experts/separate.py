"""Routed experts whose quantized matrices checkpoints store one by one.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from interposer import ExpertsSpec, Site
from interposer.errors import CheckpointError
from interposer_ops.layers.expert_loop import separate_projections
from interposer_quantization._weights.packed_linear import register_stored


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the two projections of every expert.

    Attributes:
        name: what its parameters begin with.
        parts: the checkpoint's names of its matrices, those of gates first.
        outputs: of each of these.
    """

    name: str
    parts: tuple[str, ...]
    outputs: int
    inputs: int

    @property
    def all_outputs(self) -> int:
        """Return the outputs of all of its matrices."""
        return len(self.parts) * self.outputs

    def register(
        self,
        layer: nn.Module,
        stored: str,
        tensor: torch.Tensor,
        sample: Callable[[torch.Generator], torch.Tensor] | None = None,
    ) -> None:
        """Register what holds the tensors ``stored`` of all experts, ``[E, ...]``.

        Rows of each matrix lie along dimension 1, as many as those of the others.
        """
        sizes = {part: tensor.shape[1] // len(self.parts) for part in self.parts}
        attributes: dict[str, object] = {"expert_parts": sizes, "expert_tensor": stored}
        if sample is not None:
            attributes["sample"] = sample
        register_stored(layer, f"{self.name}_{stored}", tensor, **attributes)

    def taken(self, layer: nn.Module, stored: str) -> torch.Tensor:
        """Take away and return the parameters of ``register``."""
        tensor = layer.get_parameter(f"{self.name}_{stored}").data
        layer.register_parameter(f"{self.name}_{stored}", None)
        return tensor

    def tensor_name(self, prefix: str, expert: int, row: int, rows: int, stored: str) -> str:
        """Return the checkpoint's name of a tensor that row ``row`` of ``rows`` is from."""
        return f"{prefix}.{expert}.{self.parts[row * len(self.parts) // rows]}.{stored}"


def projections_of(site: Site, spec: ExpertsSpec) -> tuple[Projection, Projection]:
    """Return both projections of experts whose matrices are stored one by one.

    Raises: ConfigError: they are stored together, or have biases.
    """
    gate, up, down = separate_projections(site, spec)
    return (
        Projection("gate_up", (gate, up), spec.intermediate_size, spec.hidden_size),
        Projection("down", (down,), spec.hidden_size, spec.intermediate_size),
    )


def names_of_matrices(prefix: str, spec: ExpertsSpec) -> list[str]:
    """Return the checkpoint's names of all matrices; none where they are stored together."""
    parts = spec.projections or ()
    return [f"{prefix}.{expert}.{part}" for expert in range(spec.num_experts) for part in parts]


def check_scales(
    projection: Projection, prefix: str, stored: str, scales: torch.Tensor
) -> torch.Tensor:
    """Return ``scales`` ``[E, R, ...]``, after a look at them.

    Raises: CheckpointError: one is zero or not finite.
    """
    wrong = ~scales.isfinite() | (scales == 0)
    if wrong.any():
        expert, row = (int(place) for place in wrong.nonzero()[0][:2])
        raise CheckpointError(
            projection.tensor_name(prefix, expert, row, scales.shape[1], stored),
            f"holds {int(wrong[expert].sum())} scales that are zero, infinite or not a number",
            "copy the checkpoint again, or quantize again",
        )
    return scales
