"""The gated MLP of a decoder block. T tokens, H hidden size, I intermediate size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.divided_pairs import PairNames, share_inner
from interposer_ops.layers.linear import Linear

__all__ = ["GatedMLP"]


class GatedMLP(PluggableLayer):
    """Merged gate and up projection, gated activation, down projection.

    Its parts are layers of their own, as those of ``SelfAttention``.

    Args:
        activation: as of ``GatedActivation``.

    ``part_names`` are those of gate, up and down projection in checkpoints; a class that sets
    ``ends_in_projection`` in its body returns what the last one does.
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
        names = PairNames("gate_up_proj", last, bias, bias)
        sizes = hidden_size, intermediate_size
        shares = share_inner(site, *sizes, names, dict.fromkeys(first, 1))
        self.gate_up_proj = shares.first()
        self.activation = GatedActivation(site.at("activation"), activation, shares.size)
        self.down_proj = shares.last()
        # What a replacement reads of its parts is its own affair.
        standard = GatedMLP, GatedActivation, Linear
        if (type(self), type(self.activation), type(self.down_proj)) == standard:
            self.activation.quantize_for(site.at("activation"), self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))  # type: ignore[no-any-return]
