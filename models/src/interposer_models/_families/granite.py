"""Granite: Llama with multipliers of embeddings, scores, block outputs and logits.

Source: arXiv:2405.04324; the multipliers are those of arXiv:2203.03466.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.decoder import Block, CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.self_attention import SelfAttention

Multiplier = Annotated[float, Field(gt=0)]


class ScaledBlock(DecoderBlock):
    """A block that scales the output of each sublayer before adding to the residual stream."""

    def __init__(
        self,
        site: Site,
        sizes: tuple[int, float],
        parts: tuple[Callable[[Site], SelfAttention], Callable[[Site], nn.Module]],
        multiplier: float,
    ) -> None:
        super().__init__(site, *sizes, *parts)
        self.multiplier = multiplier

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
        """Return the block's output, not yet added, and the residual stream."""
        x, residual = self.input_layernorm.forward_add(x, residual)
        x = self.self_attn(x, cos, sin, cache, plan, rows) * self.multiplier
        if rows is not None:
            residual = residual[rows]
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp(x) * self.multiplier, residual


class ScaledLM(CausalLM):
    """A decoder with logits divided by a constant."""

    def __init__(self, site: Site, config: DecoderFamily, block: Block, divisor: float) -> None:
        super().__init__(site, config, block, config.norm)
        self.divisor = divisor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        return super().forward(*args, **kwargs) / self.divisor


class Granite(DecoderFamily):
    """Granite 3, the dense models."""

    attention_multiplier: Multiplier = 1.0
    embedding_multiplier: Multiplier = 1.0
    logits_scaling: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return self.embedding_multiplier

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the attention; the score scale is ``attention_multiplier``."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, scale=self.attention_multiplier)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build the block, with the multiplier of residual outputs."""

        def attention(attention_site: Site) -> SelfAttention:
            return self.self_attention(
                attention_site, index, self.attention_spec(attention_site, index, page_size)
            )

        sizes, parts = (
            (self.hidden_size, self.rms_norm_eps),
            (attention, lambda _: self.mlp(site, index)),
        )
        return ScaledBlock(site, sizes, parts, self.residual_multiplier)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        scale = self.logits_scaling
        return ScaledLM(site, self, lambda at, index: self.block(at, index, page_size), scale)
