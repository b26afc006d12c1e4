"""The layers of BART: attention of a source, and blocks with a norm behind every sum.

Dimensions: T tokens, R tokens that matter, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.attention import Unrotated
from interposer_models._decoder.decoder import Norm
from interposer_models._encoder_decoder.attention import CrossAttention, EncoderAttention


class BartEncoderAttention(EncoderAttention):
    """Attention of a source to itself that knows no positions."""

    rotary_type = Unrotated
    part_names = ("out_proj", "q_norm", "k_norm")


class BartBlock(nn.Module):
    """Attention, in a decoder attention to a source, and an MLP; a norm follows every sum.

    So there is no stream besides what a block returns. Sums are in float32 or wider.

    Args:
        norm: returns the norm at a site.
        cross: the attention to a source; None in an encoder.
    """

    def __init__(
        self,
        site: Site,
        norm: Norm,
        attention: nn.Module,
        mlp: nn.Module,
        cross: CrossAttention | None,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = norm(site.at("self_attn_layer_norm"))
        self.encoder_attn = cross
        if cross is not None:
            self.encoder_attn_layer_norm = norm(site.at("encoder_attn_layer_norm"))
        self.mlp = mlp
        self.final_layer_norm = norm(site.at("final_layer_norm"))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: Any,
        plan: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, None]:
        """Return the block's output, ``[T, H]`` or ``[R, H]``, and no stream.

        Args:
            cache, plan: in a decoder two of each, of its own tokens and of the source.
        """
        if self.encoder_attn is None:
            own = self.self_attn(x, cos, sin, cache, plan, None)
        else:
            own = self.self_attn(x, cos, sin, cache[0], plan[0], None)
        x = _summed(self.self_attn_layer_norm, own, x)
        if self.encoder_attn is not None:
            read = self.encoder_attn(x, cache[1], plan[1], rows)
            x = _summed(self.encoder_attn_layer_norm, read, x if rows is None else x[rows])
        return _summed(self.final_layer_norm, self.mlp(x), x), None


class Unnormed(nn.Module):
    """Stands where other decoders have a last norm."""

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x`` twice."""
        return x, x


def _summed(norm: nn.Module, x: Tensor, stream: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normalised: Tensor = norm.forward_add(x, stream.to(wide))[0]  # type: ignore[operator]
    return normalised
