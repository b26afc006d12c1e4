"""Whisper: an encoder-decoder whose encoder reads the log-mel spectrogram of a sound.

Two convolutions, of which the second halves the number of frames, compute the encoder's input.
Encoder and decoder have tables of positions. As in mBART, norms are before each sublayer, and after
the last block of encoder and decoder.

Source: arXiv:2212.04356.

Dimensions: B sounds, M mel bins, F frames, E encoder positions of all sounds, H hidden size.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from pydantic import AliasChoices, Field
from torch import Tensor, nn
from torch.nn import functional

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.settings import FrameNames, Positive
from interposer_models._encoder_decoder import (
    CrossAttention,
    CrossDecoder,
    EncoderDecoderLM,
    EncoderInputBatch,
    SourceEncoder,
)
from interposer_models._families.bart import Bart, MBart, MBartEncoderSettings
from interposer_ops.layers.self_attention import SelfAttention

_KERNEL_SIZE = 3
_STRIDE = 2


class FrameConvolution(PluggableLayer):
    """Convolution over frames with a kernel of 3 and zero padding of 1 on each side, then GELU."""

    def __init__(self, site: Site, in_size: int, out_size: int, stride: int) -> None:
        super().__init__(site)
        self.stride = stride
        for name, shape in ("weight", (out_size, in_size, _KERNEL_SIZE)), ("bias", (out_size,)):
            empty = torch.empty(shape, dtype=site.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[B, out_size, ceil(F / stride)]`` of ``x`` ``[B, in_size, F]``."""
        weight, bias = self.get_parameter("weight"), self.get_parameter("bias")
        padding = _KERNEL_SIZE // 2
        x = functional.conv1d(x.to(weight.dtype), weight, bias, self.stride, padding)
        return functional.gelu(x)


class WhisperEncoder(SourceEncoder):
    """Encoder of Whisper: convolutions over frames, learned positions, blocks and final norm."""

    def __init__(self, site: Site, config: Whisper, *parts: Any) -> None:
        super().__init__(site, config, *parts)
        del self.embed_tokens  # the convolutions replace it
        hidden_size = config.hidden_size
        self.conv1 = FrameConvolution(site.at("conv1"), config.num_mel_bins, hidden_size, 1)
        self.conv2 = FrameConvolution(site.at("conv2"), hidden_size, hidden_size, _STRIDE)

    def embed_inputs(self, sources: EncoderInputBatch) -> Tensor:
        """Compute the input of the first block, ``[E, H]``, from features ``[B, M, F]``."""
        assert sources.features is not None
        assert self.embed_positions is not None
        x: Tensor = self.conv2(self.conv1(sources.features))
        positions: Tensor = self.embed_positions(sources.positions)
        return x.mT.flatten(0, 1) + positions


class WhisperLM(EncoderDecoderLM):
    """Encoder, decoder and LM head of Whisper.

    Args:
        config, source: settings of the decoder and of the encoder.
    """

    decoder_type = CrossDecoder

    def __init__(self, site: Site, config: Whisper, source: Whisper, page_size: int) -> None:
        super().__init__(
            site, config, lambda at, i: config.block(at, i, page_size), config.last_norm
        )
        self.encoder = WhisperEncoder(
            site.at(source.frame.decoder),
            source,
            lambda at, i: source.block(at, i, page_size),
            source.last_norm,
            None,
            self.model.embed_tokens,
        )
        self.feature_shape = config.num_mel_bins, _STRIDE * config.max_source_positions


class Whisper(MBart):
    """Settings of Whisper's decoder, which also build encoder and decoder."""

    frame = FrameNames(
        "model.decoder", norm="layer_norm", head="proj_out", positions="embed_positions"
    )

    num_mel_bins: Positive = 80
    max_source_positions: Positive = 1500
    max_position_embeddings: Positive = Field(
        448, validation_alias=AliasChoices("max_target_positions", "max_position_embeddings")
    )

    @cached_property
    def encoder(self) -> Bart:
        """The settings of Whisper's encoder."""
        fields = {**self.encoder_fields(), "max_position_embeddings": self.max_source_positions}
        return WhisperEncoderSettings.model_construct(**fields)

    @property
    def embedding_scale(self) -> float:
        """The factor of token embeddings: 1, because Whisper ignores ``scale_embedding``."""
        return 1.0

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name unchanged."""
        return name

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the decoder's self-attention of layer ``index``, whose keys have no bias."""
        attention = super().self_attention(site, index, spec)
        _allow_missing_key_bias(attention.qkv_proj)
        return attention

    def cross_attention(self, block: Site, index: int, page_size: int) -> CrossAttention:
        """Build the decoder's cross-attention of layer ``index``, whose keys have no bias."""
        attention = super().cross_attention(block, index, page_size)
        _allow_missing_key_bias(attention.kv_proj)
        return attention

    def build(self, site: Site, page_size: int) -> WhisperLM:  # type: ignore[override]
        """Build the encoder, the decoder and the LM head."""
        return WhisperLM(site, self, self.encoder, page_size)  # type: ignore[arg-type]


class WhisperEncoderSettings(MBartEncoderSettings, Whisper):
    """Settings of Whisper's encoder, under the decoder's field names."""

    frame = FrameNames("model.encoder", norm="layer_norm", positions="embed_positions")

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the self-attention of an encoder block, whose keys have no bias."""
        attention = super().self_attention(site, index, spec)
        _allow_missing_key_bias(attention.qkv_proj)
        return attention


def _allow_missing_key_bias(projection: nn.Module) -> None:
    """Let a merged projection with a bias load from a checkpoint without a bias of the keys."""
    bias: Any = projection.get_parameter("bias")
    bias.default = 0.0
    bias.default_parts = frozenset({"k_proj"})
