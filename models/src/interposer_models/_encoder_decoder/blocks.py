"""Decoder blocks with cross-attention.

Dimensions: T tokens, R tokens to output, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.blocks import Names, NormedBlock
from interposer_models._decoder.decoder import Norm


class CrossedBlock(NormedBlock):
    """A ``NormedBlock`` with cross-attention between self-attention and MLP.

    Args:
        crossing: the names of the norms before and after the cross-attention; an empty name means
            no norm.
        cross: the cross-attention.
        cross_name: the module name of the cross-attention.
    """

    def __init__(
        self,
        site: Site,
        norm: Norm,
        names: Names,
        attention: nn.Module,
        mlp: nn.Module,
        crossing: tuple[str, str],
        cross: nn.Module,
        cross_name: str,
    ) -> None:
        super().__init__(site, norm, names, attention, mlp)
        self.crossing, self.cross_name = crossing, cross_name
        self.add_module(cross_name, cross)
        for name in filter(None, crossing):
            self.add_module(name, norm(site.at(name)))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        plan: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the stream, as ``DecoderBlock``.

        Args:
            cache, plan: two of each: for self-attention and for cross-attention.
        """
        cross: Any = self._modules[self.cross_name]
        x, stream = self._sublayer_input(self.names[0], x, residual)
        # The plan of the cross-attention counts all T tokens, so rows are dropped only after it.
        x = self._sublayer_output(
            self.names[1], self.self_attn(x, cos, sin, cache[0], plan[0], None)
        )
        x, stream = self._sublayer_input(self.crossing[0], x, stream)
        x = self._sublayer_output(self.crossing[1], cross(x, cache[1], plan[1], rows))
        if rows is not None:
            stream = stream[rows]
        x, stream = self._sublayer_input(self.names[2], x, stream)
        return self._sublayer_output(self.names[3], self.mlp(x)), stream
