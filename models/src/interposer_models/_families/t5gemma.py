"""T5Gemma: an encoder-decoder of Gemma 2's blocks, with cross-attention in the decoder.

Source: arXiv:2504.06225.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer.errors import CheckpointError
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.settings import FrameNames
from interposer_models._encoder_decoder.attention import CrossAttention, EncoderAttention
from interposer_models._encoder_decoder.blocks import CrossedBlock
from interposer_models._encoder_decoder.family import EncoderDecoderFamily
from interposer_models._encoder_decoder.model import EncoderDecoderLM, SourceEncoder
from interposer_models._families.gemma2 import Gemma2
from interposer_ops.sampling import logits_softcap

_NORMS = (
    "pre_self_attn_layernorm",
    "post_self_attn_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_CROSSING = ("pre_cross_attn_layernorm", "post_cross_attn_layernorm")
# Fields that config.json states once for encoder and decoder.
_COMMON = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")


class T5GemmaEncoderSettings(Gemma2):
    """The settings of the encoder, with windows that reach equally far in both directions."""

    frame = FrameNames("model.encoder")

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the attention; the config's window does not count the token itself."""
        spec = super().attention_spec(site, index, page_size)
        window = spec.window_tokens
        # AttentionSpec counts the token itself.
        return replace(spec, window_tokens=None if window is None else window + 1)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build block ``index`` of the encoder at a site."""
        attention_site = site.at("self_attn")
        spec, sizes = (
            self.attention_spec(attention_site, index, page_size),
            (self.hidden_size, self.rotary_size),
        )
        attention = EncoderAttention(attention_site, spec, *sizes, self.attention_bias)
        return NormedBlock(site, self.norm, _NORMS, attention, self.mlp(site, index))


class T5Gemma(Gemma2, EncoderDecoderFamily):
    """The settings of T5Gemma's decoder."""

    frame = FrameNames("model.decoder", head="lm_head.out_proj")

    encoder: T5GemmaEncoderSettings

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, which has the settings of encoder and decoder as nested objects."""
        sides = {name: config.get(name) for name in ("encoder", "decoder")}
        for name, side in sides.items():
            if not isinstance(side, Mapping):
                reason = f"{name}: must be the settings of the {name} (got {side!r:.100})"
                raise CheckpointError(source, reason, "mend the field")
        common = {name: config[name] for name in _COMMON if name in config}
        encoder = T5GemmaEncoderSettings.parse(sides["encoder"], f"{source}, encoder")  # type: ignore[arg-type]
        # Common fields take precedence over the decoder's copies of them.
        decoder = {**sides["decoder"], **common, "encoder": encoder}  # type: ignore[dict-item]
        return super().parse(decoder, f"{source}, decoder")

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``, with cross-attention and norms around all sublayers."""
        attention_site, cross_site = site.at("self_attn"), site.at(self.cross_name)
        cross = CrossAttention(
            cross_site,
            self.cross_spec(cross_site, index, page_size),
            self.hidden_size,
            self.encoder.hidden_size,
            bias=self.attention_bias,
        )
        return CrossedBlock(
            site,
            self.norm,
            _NORMS,
            self.self_attention(
                attention_site, index, self.attention_spec(attention_site, index, page_size)
            ),
            self.mlp(site, index),
            _CROSSING,
            cross,
            self.cross_name,
        )

    def build(self, site: Site, page_size: int) -> EncoderDecoderLM:
        """Build encoder, decoder and LM head."""
        return T5GemmaLM(site, self, page_size)

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Self:
        if self.encoder.vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size} of the decoder and {self.encoder.vocab_size} of "
                "the encoder, must be equal"
            )
        return self


class T5GemmaLM(EncoderDecoderLM):
    """Encoder and decoder with separate embeddings, and capped logits."""

    def __init__(self, site: Site, config: T5Gemma, page_size: int) -> None:
        super().__init__(site, config, lambda at, i: config.block(at, i, page_size), config.norm)
        side, self.cap = config.encoder, config.final_logit_softcapping
        self.encoder = SourceEncoder(
            site.at(side.frame.decoder),
            side,
            lambda at, i: side.block(at, i, page_size),
            side.norm,
            None,
        )
        self.bound = site.at("logits").bind(logits_softcap, vocab_size=config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        logits = super().forward(*args, **kwargs)
        return logits if self.cap is None else self.bound(logits, self.cap)
