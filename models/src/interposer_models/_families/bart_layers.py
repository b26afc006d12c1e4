"""The layers of BART: encoder attention, and blocks with a norm after every residual sum.

Dimensions: T tokens, R tokens to output, H hidden size.
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
    """Encoder self-attention without rotary embedding, under BART's parameter names."""

    rotary_type = Unrotated
    part_names = ("out_proj", "q_norm", "k_norm")


class BartBlock(nn.Module):
    """Self-attention, cross-attention in a decoder, and an MLP; a norm follows every residual sum.

    So there is no residual stream apart from the block's output. Sums are in float32 or wider.

    Args:
        norm: builds the norm at a site.
        cross: the cross-attention; None in an encoder.
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
        """Return the block's output, ``[T, H]`` or ``[R, H]``, and None as residual stream.

        Args:
            cache, plan: in a decoder two of each: for self-attention and for cross-attention.
        """
        # The plan of the cross-attention counts all T tokens, so rows are dropped only after it.
        if self.encoder_attn is None:
            self_attended = self.self_attn(x, cos, sin, cache, plan, None)
        else:
            self_attended = self.self_attn(x, cos, sin, cache[0], plan[0], None)
        x = _add_and_norm(self.self_attn_layer_norm, self_attended, x)
        if self.encoder_attn is not None:
            cross_attended = self.encoder_attn(x, cache[1], plan[1], rows)
            x = _add_and_norm(
                self.encoder_attn_layer_norm, cross_attended, x if rows is None else x[rows]
            )
        return _add_and_norm(self.final_layer_norm, self.mlp(x), x), None


class NoNorm(nn.Module):
    """Stands in for the final norm of other decoders, and does nothing."""

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return x, x


def _add_and_norm(norm: nn.Module, x: Tensor, stream: Tensor) -> Tensor:
    stream_dtype = torch.promote_types(x.dtype, torch.float32)
    normalised: Tensor = norm.forward_add(x, stream.to(stream_dtype))[0]  # type: ignore[operator]
    return normalised
