"""BART: an encoder-decoder with learned positions and a layer norm after every residual sum.

Source: arXiv:1910.13461.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import AliasChoices, Field, model_validator
from torch import nn

from interposer import AttentionSpec, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import FrameNames, Positive
from interposer_models._decoder.whole_heads import MultiHeadFamily
from interposer_models._encoder_decoder.attention import CrossAttention
from interposer_models._encoder_decoder.family import EncoderDecoderFamily
from interposer_models._families.bart_layers import BartBlock, BartEncoderAttention, NoNorm
from interposer_models._families.bart_model import BartLM
from interposer_models._families.opt import OPTAttention
from interposer_ops.layers.self_attention import SelfAttention

# The config of BART does not state it.
_EPS = 1e-5
_MLP = ("fc1", "fc2")


def _either(*names: str) -> Any:
    return Field(validation_alias=AliasChoices(*names))


class Bart(MultiHeadFamily, EncoderDecoderFamily):
    """The settings of BART's decoder."""

    cross_name = "encoder_attn"
    frame = FrameNames("model.decoder", positions="embed_positions", first_position=2)

    hidden_size: Positive = _either("d_model", "hidden_size")
    num_hidden_layers: Positive = _either("decoder_layers", "num_hidden_layers")
    num_attention_heads: Positive = _either("decoder_attention_heads", "num_attention_heads")
    intermediate_size: Positive = _either("decoder_ffn_dim", "intermediate_size")
    hidden_act: str = Field(
        "gelu", validation_alias=AliasChoices("activation_function", "hidden_act")
    )
    encoder_layers: Positive
    encoder_attention_heads: Positive
    encoder_ffn_dim: Positive
    scale_embedding: bool = False
    tie_word_embeddings: bool = True

    @cached_property
    def encoder(self) -> Bart:
        """The settings of the encoder."""
        # Without validation: the fields were validated as part of the decoder's settings.
        return BartEncoderSettings.model_construct(**self.encoder_fields())

    def encoder_fields(self) -> dict[str, Any]:
        """Return the fields of the encoder's settings, with the decoder's names."""
        sizes = {
            "num_hidden_layers": self.encoder_layers,
            "num_attention_heads": self.encoder_attention_heads,
            "intermediate_size": self.encoder_ffn_dim,
        }
        return {**dict(self), **sizes}

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings, applied before positions are added."""
        return float(self.hidden_size**0.5) if self.scale_embedding else 1.0

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json; untied embeddings are refused."""
        parsed = super().parse(config, source)
        if not parsed.tie_word_embeddings:
            reason = "tie_word_embeddings is False, which is not computed"
            raise UnsupportedModelError(source, reason)
        return parsed

    def renamed(self, name: str) -> str | None:
        """Return the name; None for copies of the shared embedding, as in early checkpoints."""
        return None if name.endswith(".embed_tokens.weight") else name

    def norm(self, site: Site) -> LayerNorm:
        """Build the norm at a site."""
        return LayerNorm(site, self.hidden_size, _EPS)

    def mlp(self, block: Site, index: int) -> PlainMLP:
        """Build the MLP of layer ``index``, with tensors directly below the block."""
        return PlainMLP(
            block, (self.hidden_size, self.intermediate_size), _MLP, self.hidden_act, True
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the decoder's self-attention of layer ``index`` at a site."""
        return OPTAttention(site, spec, self.hidden_size, 0, None, True, True)

    def cross_attention(self, block: Site, index: int, page_size: int) -> CrossAttention:
        """Build the cross-attention of layer ``index``, below a block's site."""
        cross_site, size = block.at(self.cross_name), self.hidden_size
        return CrossAttention(
            cross_site, self.cross_spec(cross_site, index, page_size), size, size, "out_proj", True
        )

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build block ``index`` of the decoder at a site."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        cross = self.cross_attention(site, index, page_size)
        return BartBlock(site, self.norm, attention, self.mlp(site, index), cross)

    def last_norm(self, site: Site) -> nn.Module:
        """Build the module after the last block of encoder or decoder; BART has no norm there."""
        return NoNorm()

    def build(self, site: Site, page_size: int) -> BartLM:
        """Build encoder, decoder and LM head."""
        return BartLM(site, self, self.encoder, page_size)

    @model_validator(mode="after")
    def _sound_encoder_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.encoder_attention_heads
        if hidden % heads:
            raise ValueError(
                f"d_model {hidden} is not a multiple of {heads} encoder_attention_heads"
            )
        return self


class BartEncoderSettings(Bart):
    """The settings of BART's encoder."""

    frame = FrameNames("model.encoder", positions="embed_positions", first_position=2)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the encoder's self-attention at a site."""
        return BartEncoderAttention(site, spec, self.hidden_size, 0, True)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build block ``index`` of the encoder at a site."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        return BartBlock(site, self.norm, attention, self.mlp(site, index), None)
