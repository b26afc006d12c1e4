"""The gated MLP of a decoder block. T tokens, H hidden size, I intermediate size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_mlp

__all__ = ["GatedMLP"]


class GatedMLP(PluggableLayer):
    """Gated MLP: merged gate and up projection, gated activation, down projection.

    The parts are layers themselves, as in ``SelfAttention``.

    Args:
        activation: name as for ``GatedActivation``.

    ``part_names`` are the checkpoint names of gate, up and down projection. A class that sets
    ``ends_in_projection`` in its body returns the last projection's result unchanged.
    """

    layer_id = "gated_mlp"
    reduces = True
    ends_in_projection: ClassVar[bool] = True
    part_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool = False,
    ) -> None:
        super().__init__(site)
        *first, last = self.part_names
        names = ProjectionNames("gate_up_proj", last, bias, bias)
        sizes = hidden_size, intermediate_size
        shards = shard_mlp(site, *sizes, names, dict.fromkeys(first, 1))
        self.gate_up_proj = shards.first()
        self.activation = GatedActivation(site.at("activation"), activation, shards.size)
        self.down_proj = shards.last()
        # Only standard classes: a replacement may read the activation's result elsewhere, too.
        standard = GatedMLP, GatedActivation, Linear
        if (type(self), type(self.activation), type(self.down_proj)) == standard:
            self.activation.quantize_for(site.at("activation"), self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the gated MLP of ``x`` ``[T, H]``."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))  # type: ignore[no-any-return]
