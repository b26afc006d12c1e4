"""One block of a decoder.

Dimensions: T tokens, M selected tokens, H hidden size, R rotated size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.layers.linear import MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.fused_all_reduce import (
    ends_in_projection,
    fuse_all_reduce,
)

__all__ = ["DecoderBlock"]


class DecoderBlock(PluggableLayer):
    """Pre-norm transformer block: norm, attention, norm, MLP, with a residual stream.

    The block's parts are layers themselves, as in ``SelfAttention``.

    Args:
        norm_eps: epsilon of both norms.
        attention: builds the attention layer at a site.
        mlp: builds the module at a site that maps ``[T, H]`` to ``[T, H]``: an MLP or a MoE layer.
    """

    layer_id = "decoder_block"
    reduces = True

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        norm_eps: float,
        attention: Callable[[Site], SelfAttention],
        mlp: Callable[[Site], nn.Module],
    ) -> None:
        super().__init__(site)
        self.input_layernorm = RMSNorm(site.at("input_layernorm"), hidden_size, norm_eps)
        self.self_attn = attention(site.at("self_attn"))
        self.post_attention_layernorm = RMSNorm(
            site.at("post_attention_layernorm"), hidden_size, norm_eps
        )
        self.mlp = mlp(site.at("mlp"))
        # Only standard classes: a replacement may read the normalised rows elsewhere too, and a
        # MoE layer reads the rows twice (router and experts), so both need the unquantized rows.
        for norm, part, standard, name in (
            (self.input_layernorm, self.self_attn, SelfAttention, "qkv_proj"),
            (self.post_attention_layernorm, self.mlp, GatedMLP, "gate_up_proj"),
        ):
            if (type(self), type(norm), type(part)) == (DecoderBlock, RMSNorm, standard):
                receiver = getattr(part, name)
                if type(receiver) is MergedLinear:
                    norm.quantize_for(site.at(norm.prefix.rpartition(".")[2]), receiver)
        # The all-reduce of the output projection moves into the norm after attention. The model
        # does the same for the MLP and the next block's norm.
        attention_layer, next_norm = self.self_attn, self.post_attention_layernorm
        if type(self) is DecoderBlock and ends_in_projection(attention_layer, SelfAttention):
            fuse_all_reduce(
                site.at("post_attention_layernorm"),
                attention_layer.o_proj,
                next_norm,
                (attention_layer,),
            )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP output, not yet added to the residual stream, and the residual stream.

        Both are ``[T, H]``, or ``[M, H]`` if ``rows`` selects tokens.

        Args:
            x: ``[T, H]``, the output of the previous block, to be added to the stream.
            residual: ``[T, H]``, the stream that ``RMSNorm.forward_add`` returned; None in the
                first block.
            cos, sin: ``[T, R / 2]``, float32 or wider.
            cache, plan: arguments of the attention backend.
            rows: ``[M]`` int64, the selected tokens.
        """
        x, residual = self.input_layernorm.forward_add(x, residual)
        x = self.self_attn(x, cos, sin, cache, plan, rows)
        if rows is not None:
            residual = residual[rows]
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp(x), residual
