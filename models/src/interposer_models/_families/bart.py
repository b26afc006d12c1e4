"""BART and mBART: encoder-decoders with learned positions and a shared embedding table.

In BART a layer norm follows every residual sum. mBART has norms before each sublayer, and after the
last block of encoder and decoder.

Source: arXiv:1910.13461 (BART), arXiv:2001.08210 (mBART).

Dimensions: T tokens, R tokens to output, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import Unrotated
from interposer_models._decoder.decoder import Decoder, Norm
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import FrameNames, Positive
from interposer_models._encoder_decoder import (
    CrossAttention,
    CrossDecoder,
    CrossedBlock,
    EncoderAttention,
    EncoderDecoderFamily,
    EncoderDecoderLM,
    SourceEncoder,
)
from interposer_models._families.opt import OPTAttention
from interposer_ops.layers.embedding import Embedding
from interposer_ops.layers.self_attention import SelfAttention


class BartEncoderAttention(EncoderAttention):
    """Encoder self-attention without rotary embedding, with BART's parameter names."""

    rotary_type = Unrotated
    part_names = ("out_proj", "q_norm", "k_norm")


class BartBlock(nn.Module):
    """Block of BART: self-attention, optional cross-attention and MLP, each followed by a norm.

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
        """Return the block's output, ``[T, H]`` or ``[R, H]``, and None as the residual stream.

        Args:
            cache, plan: in a decoder, pairs for self-attention and for cross-attention.
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
    """Identity module in place of the final norm that other decoders have."""

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return x, x


def _add_and_norm(norm: nn.Module, x: Tensor, stream: Tensor) -> Tensor:
    stream_dtype = torch.promote_types(x.dtype, torch.float32)
    normalised: Tensor = norm.forward_add(x, stream.to(stream_dtype))[0]  # type: ignore[operator]
    return normalised


class _NormedEmbeddings(Decoder):
    """Mixin that adds learned positions to scaled embeddings, and normalises the sum."""

    def __init__(self, site: Site, config: Any, *parts: Any) -> None:
        super().__init__(site, config, *parts)
        self.layernorm_embedding = config.norm(site.at("layernorm_embedding"))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the input of the first block, ``[T, H]``."""
        x: Tensor = self.embed_tokens(token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        assert self.embed_positions is not None
        x = x + self.embed_positions(positions + self.config.frame.first_position)
        return self.layernorm_embedding(x)  # type: ignore[no-any-return]


class BartDecoder(_NormedEmbeddings, CrossDecoder):
    """Decoder of BART: learned positions, and a norm after the embeddings."""


class BartEncoder(_NormedEmbeddings, SourceEncoder):
    """Encoder of BART: learned positions, and a norm after the embeddings."""


class LogitsBias(PluggableLayer):
    """Adds a bias per token to the logits, unless all biases in the checkpoint are zero."""

    def __init__(self, site: Site, vocab_size: int) -> None:
        super().__init__(site)
        bias = nn.Parameter(torch.empty(1, vocab_size, dtype=site.dtype), requires_grad=False)
        bias.stored_as = site.prefix  # type: ignore[attr-defined]
        # Checkpoints without the tensor get zeros.
        bias.default = 0.0  # type: ignore[attr-defined]
        self.register_parameter("bias", bias)
        # In a tuple, so that torch does not register it as a second parameter.
        self.operands: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Keep the bias if any element is nonzero."""
        bias = self.get_parameter("bias")
        self.operands = (bias,) if bias.any() else ()

    def forward(self, logits: Tensor) -> Tensor:
        """Add the bias of each token to ``logits`` ``[R, V]``."""
        return logits + self.operands[0] if self.operands else logits


class BartLM(EncoderDecoderLM):
    """Encoder, decoder and LM head, which share one embedding table.

    Args:
        config, source: settings of the decoder and of the encoder.
    """

    decoder_type = BartDecoder

    def __init__(self, site: Site, config: Any, source: Any, page_size: int) -> None:
        head = site.at(config.frame.head)
        # Both sides and the head use this table; without it each would build its own.
        shared = Embedding(site.at("model.shared"), config.vocab_size, config.hidden_size, head)
        super().__init__(
            site, config, lambda at, i: config.block(at, i, page_size), config.last_norm, shared
        )
        self.encoder = BartEncoder(
            site.at(source.frame.decoder),
            source,
            lambda at, i: source.block(at, i, page_size),
            source.last_norm,
            None,
            shared,
        )
        self.final_logits_bias = LogitsBias(site.at("final_logits_bias"), config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        return self.final_logits_bias(super().forward(*args, **kwargs))  # type: ignore[no-any-return]


# The config of BART does not state it.
_EPS = 1e-5
_MLP = ("fc1", "fc2")


def _either(*names: str) -> Any:
    return Field(validation_alias=AliasChoices(*names))


class Bart(MultiHeadFamily, EncoderDecoderFamily):
    """Settings of BART's decoder, which also build encoder and decoder."""

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
        """The settings of BART's encoder."""
        # Without validation: the fields were validated as part of the decoder's settings.
        return BartEncoderSettings.model_construct(**self.encoder_fields())

    def encoder_fields(self) -> dict[str, Any]:
        """Return the config fields of the encoder under the decoder's names."""
        sizes = {
            "num_hidden_layers": self.encoder_layers,
            "num_attention_heads": self.encoder_attention_heads,
            "intermediate_size": self.encoder_ffn_dim,
        }
        return {**dict(self), **sizes}

    @property
    def embedding_scale(self) -> float:
        """The factor by which embeddings are multiplied before positions are added."""
        return float(self.hidden_size**0.5) if self.scale_embedding else 1.0

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, and refuse untied embeddings."""
        parsed = super().parse(config, source)
        if not parsed.tie_word_embeddings:
            reason = "tie_word_embeddings is False, which is not supported"
            raise UnsupportedModelError(source, reason)
        return parsed

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name unchanged; None for copies of the shared embedding."""
        return None if name.endswith(".embed_tokens.weight") else name

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, _EPS)

    def mlp(self, block: Site, index: int) -> PlainMLP:
        """Build the MLP of layer ``index``, whose tensors lie directly below the block's name."""
        return PlainMLP(
            block, (self.hidden_size, self.intermediate_size), _MLP, self.hidden_act, True
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the decoder's self-attention of layer ``index``."""
        return OPTAttention(site, spec, self.hidden_size, 0, None, True, True)

    def cross_attention(self, block: Site, index: int, page_size: int) -> CrossAttention:
        """Build the decoder's cross-attention of layer ``index``."""
        cross_site, size = block.at(self.cross_name), self.hidden_size
        return CrossAttention(
            cross_site, self.cross_spec(cross_site, index, page_size), size, size, "out_proj", True
        )

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        cross = self.cross_attention(site, index, page_size)
        return BartBlock(site, self.norm, attention, self.mlp(site, index), cross)

    def last_norm(self, site: Site) -> nn.Module:
        """Build the module after the last block of encoder or decoder: for BART, the identity."""
        return NoNorm()

    def build(self, site: Site, page_size: int) -> BartLM:
        """Build the encoder, the decoder and the LM head."""
        return BartLM(site, self, self.encoder, page_size)

    @model_validator(mode="after")
    def _check_encoder_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.encoder_attention_heads
        if hidden % heads:
            raise ValueError(
                f"d_model {hidden} is not a multiple of {heads} encoder_attention_heads"
            )
        return self


class BartEncoderSettings(Bart):
    """Settings of BART's encoder, under the decoder's field names."""

    frame = FrameNames("model.encoder", positions="embed_positions", first_position=2)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the self-attention of an encoder block."""
        return BartEncoderAttention(site, spec, self.hidden_size, 0, True)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build encoder block ``index``."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        return BartBlock(site, self.norm, attention, self.mlp(site, index), None)


_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_CROSSING = ("encoder_attn_layer_norm", "")


class MBart(Bart):
    """Settings of mBART's decoder, which also build encoder and decoder."""

    frame = FrameNames(
        "model.decoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    @cached_property
    def encoder(self) -> Bart:
        """The settings of mBART's encoder."""
        return MBartEncoderSettings.model_construct(**self.encoder_fields())

    def last_norm(self, site: Site) -> nn.Module:
        """Build the LayerNorm after the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``, with norms before each sublayer."""
        attention_site, cross = site.at("self_attn"), self.cross_attention(site, index, page_size)
        attention = self.self_attention(
            attention_site, index, self.attention_spec(attention_site, index, page_size)
        )
        sublayers = attention, self.mlp(site, index)
        return CrossedBlock(site, self.norm, _NORMS, *sublayers, _CROSSING, cross, self.cross_name)


class MBartEncoderSettings(BartEncoderSettings):
    """Settings of mBART's encoder, under the decoder's field names."""

    frame = FrameNames(
        "model.encoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    def last_norm(self, site: Site) -> nn.Module:
        """Build the LayerNorm after the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build encoder block ``index``, with norms before each sublayer."""
        return self.normed_block(site, index, page_size, _NORMS)
