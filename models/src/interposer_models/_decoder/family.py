"""The parts of a decoder, each of which a family may build in another way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._cache_choice import stored_as
from interposer_models._decoder.blocks import Names, NormedBlock
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.prediction_head import PredictionHead
from interposer_models._decoder.settings import DecoderSettings
from interposer_ops.layers.cuts import local_spec
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention


class DecoderFamily(DecoderSettings):
    """A decoder with RMS norms, rotary embedding, grouped queries and a gated MLP.

    A family adds fields, gives others their defaults, and overrides the part that differs.
    """

    attention_name: ClassVar[str] = "self_attn"

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention."""
        return True

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return what the attention of layer ``index`` at a site has to do.

        Its cache is as the user or the quantization scheme has it.
        """
        cache_dtype, head_scales = stored_as(site)
        return AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=site.dtype,
            cache_dtype=cache_dtype,
            page_size=page_size,
            scale=self.head_size**-0.5,
            head_scales=head_scales,
            window_tokens=self.windows[index],
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Return the attention of layer ``index`` at a site, its projections included."""
        bias = self.attention_bias
        return SelfAttention(site, spec, self.hidden_size, self.rotary_size, None, bias, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the MLP of layer ``index``, or what stands in its place, below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act, self.mlp_bias)

    def norm(self, site: Site) -> nn.Module:
        """Return the norm of the residual stream at a site."""
        return RMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return block ``index`` at a site; its forward is that of ``DecoderBlock``."""
        return DecoderBlock(
            site,
            self.hidden_size,
            self.rms_norm_eps,
            lambda at: self.self_attention(at, index, self.attention_spec(at, index, page_size)),
            lambda _: self.mlp(site, index),
        )

    def normed_block(self, site: Site, index: int, page_size: int, names: Names) -> nn.Module:
        """Return a block whose norms stand where ``names`` of ``NormedBlock`` says."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        return NormedBlock(site, self.norm, names, attention, self.mlp(site, index))

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield spec and site of the attention of each block, in pages of one token."""
        for index in filter(self.attends, range(self.num_hidden_layers)):
            place = site.at(
                f"{self.frame.decoder}.{self.frame.layers}.{index}.{self.attention_name}"
            )
            yield (
                local_spec(place, self.attention_spec(place, index, page_size=1)),
                place.at("attn"),
            )

    def prediction_head(self, site: Site, model: CausalLM, page_size: int) -> PredictionHead | None:
        """Return the head by which checkpoints of the family predict further tokens, if any does.

        Args:
            model: of ``build``, with which it shares what it has no weights for.
        """
        return None

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Return the decoder with its head."""
        return CausalLM(site, self, lambda at, index: self.block(at, index, page_size), self.norm)
