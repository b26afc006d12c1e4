"""One block of a decoder.

Dimensions: T tokens, R tokens that matter, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.layers.fused_sums import ends_in_projection, leave_sum
from interposer_ops.layers.linear import MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention

__all__ = ["DecoderBlock"]


class DecoderBlock(PluggableLayer):
    """Attention and MLP, each behind a norm, on a residual stream.

    Its parts are layers of their own, as those of ``SelfAttention``.

    Args:
        norm_eps: of both norms.
        attention: returns the attention that is built at a site.
        mlp: returns the module at a site that computes ``[T, H]`` of ``[T, H]``: one perceptron, or
            a mixture of several.
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
        # What a replacement reads of its parts is its own affair; a mixture reads them twice.
        for norm, part, standard, name in (
            (self.input_layernorm, self.self_attn, SelfAttention, "qkv_proj"),
            (self.post_attention_layernorm, self.mlp, GatedMLP, "gate_up_proj"),
        ):
            if (type(self), type(norm), type(part)) == (DecoderBlock, RMSNorm, standard):
                receiver = getattr(part, name)
                if type(receiver) is MergedLinear:
                    norm.quantize_for(site.at(norm.prefix.rpartition(".")[2]), receiver)
        mixer, behind = self.self_attn, self.post_attention_layernorm
        if type(self) is DecoderBlock and ends_in_projection(mixer, SelfAttention):
            leave_sum(site.at("post_attention_layernorm"), mixer.o_proj, behind, (mixer,))

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
        """Return the block's output, not yet added, and the residual stream.

        Both are ``[T, H]``, or ``[R, H]`` where ``rows`` ``[R]`` names the tokens that matter.

        Args:
            x: ``[T, H]``, what is to be added to the stream.
            residual: ``[T, H]``, as ``RMSNorm.forward_add`` returns it; None at first.
            cos, sin: ``[T, R / 2]`` for R rotated elements, float32 or wider.
            cache, plan: of the attention backend.
            rows: int64, indices into T.
        """
        x, residual = self.input_layernorm.forward_add(x, residual)
        x = self.self_attn(x, cos, sin, cache, plan, rows)
        if rows is not None:
            residual = residual[rows]
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp(x), residual
