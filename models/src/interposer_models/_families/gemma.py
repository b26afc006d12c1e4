"""Gemma, Gemma 2, Gemma 3 and T5Gemma.

Gemma is the decoder of PaliGemma: Llama's blocks with another norm and scaled embeddings. The
others have norms before and after each sublayer, and sliding windows. Gemma 2 caps scores and
logits. Gemma 3 has per-head norms instead, and other rotary angles in windowed layers. T5Gemma is
an encoder-decoder of Gemma 2's blocks.

Source: arXiv:2403.08295 (Gemma), arXiv:2408.00118 (Gemma 2), arXiv:2503.19786 (Gemma 3),
arXiv:2504.06225 (T5Gemma).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AliasChoices, Field, field_validator, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer.errors import CheckpointError
from interposer_models._decoder.decoder import CausalLM, NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import (
    FrameNames,
    LayerTypeBases,
    Positive,
    RopeBase,
    WindowTokens,
)
from interposer_models._encoder_decoder import (
    CrossAttention,
    CrossedBlock,
    EncoderAttention,
    EncoderDecoderFamily,
    EncoderDecoderLM,
    SourceEncoder,
)
from interposer_ops.layers.norm import GemmaRMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.sampling import logits_softcap

Cap = Annotated[float, Field(gt=0)]
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORMS_BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")


class Gemma(DecoderFamily):
    """Settings of Gemma, which also build the decoder."""

    head_dim: Positive | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Positive = 8192
    tie_word_embeddings: bool = True

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return float(self.hidden_size**0.5)

    def norm(self, site: Site) -> GemmaRMSNorm:
        """Build an RMSNorm for the module path ``site``."""
        return GemmaRMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with norms before attention and MLP."""
        return self.normed_block(site, index, page_size, _NORMS_BEFORE)

    @field_validator("hidden_act")
    @classmethod
    def _tanh(cls, name: str) -> str:
        # The first releases state "gelu", and mean the approximation.
        return "gelu_pytorch_tanh" if name == "gelu" else name


class CappedLM(CausalLM):
    """A decoder and LM head with optional soft-capping of the logits."""

    def __init__(
        self, site: Site, config: DecoderFamily, page_size: int, cap: float | None
    ) -> None:
        super().__init__(site, config, lambda at, i: config.block(at, i, page_size), config.norm)
        self.cap = cap
        self.bound = site.at("logits").bind(logits_softcap, vocab_size=config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        logits = super().forward(*args, **kwargs)
        return logits if self.cap is None else self.bound(logits, self.cap)


class Gemma2(DecoderFamily):
    """Settings of Gemma 2, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    head_dim: Positive | None = 256
    hidden_act: str = Field(
        default="gelu_pytorch_tanh",
        validation_alias=AliasChoices("hidden_activation", "hidden_act"),
    )
    tie_word_embeddings: bool = True
    sliding_window: WindowTokens | None = 4096
    # Stated separately from the head size: Gemma 2 27B scales by hidden size / heads.
    query_pre_attn_scalar: Cap = 256
    attn_logit_softcapping: Cap | None = 50.0
    final_logit_softcapping: Cap | None = 30.0
    use_bidirectional_attention: bool = False

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return float(self.hidden_size**0.5)

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` has a sliding window: every second one, from the first."""
        return index % 2 == 0

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, with the scale and the soft cap of attention scores."""
        spec, scale = super().attention_spec(site, index, page_size), self.query_pre_attn_scalar
        return replace(spec, scale=scale**-0.5, softcap=self.attn_logit_softcapping)

    def norm(self, site: Site) -> GemmaRMSNorm:
        """Build an RMSNorm for the module path ``site``."""
        return GemmaRMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with norms before and after both attention and MLP."""
        return self.normed_block(site, index, page_size, NORMS)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head that soft-caps the logits."""
        return CappedLM(site, self, page_size, self.final_logit_softcapping)

    @model_validator(mode="after")
    def _refuse_bidirectional_attention(self) -> Self:
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention is true, which is not supported")
        return self


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
    """Settings of T5Gemma's encoder, whose windows reach equally far in both directions."""

    frame = FrameNames("model.encoder")

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec; the config's window does not count the token itself."""
        spec = super().attention_spec(site, index, page_size)
        window = spec.window_tokens
        # AttentionSpec counts the token itself.
        return replace(spec, window_tokens=None if window is None else window + 1)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build encoder block ``index``."""
        attention_site = site.at("self_attn")
        spec, sizes = (
            self.attention_spec(attention_site, index, page_size),
            (self.hidden_size, self.rotary_size),
        )
        attention = EncoderAttention(attention_site, spec, *sizes, self.attention_bias)
        return NormedBlock(site, self.norm, _NORMS, attention, self.mlp(site, index))


class T5Gemma(Gemma2, EncoderDecoderFamily):
    """Settings of T5Gemma's decoder, which also build encoder and decoder."""

    frame = FrameNames("model.decoder", head="lm_head.out_proj")

    encoder: T5GemmaEncoderSettings

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, in which the encoder's and the decoder's settings are nested."""
        sides = {name: config.get(name) for name in ("encoder", "decoder")}
        for name, side in sides.items():
            if not isinstance(side, Mapping):
                reason = f"{name}: must be the settings of the {name} (got {side!r:.100})"
                raise CheckpointError(source, reason, "correct the field")
        common = {name: config[name] for name in _COMMON if name in config}
        encoder = T5GemmaEncoderSettings.parse(sides["encoder"], f"{source}, encoder")  # type: ignore[arg-type]
        # Common fields take precedence over the decoder's copies of them.
        decoder = {**sides["decoder"], **common, "encoder": encoder}  # type: ignore[dict-item]
        return super().parse(decoder, f"{source}, decoder")

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``, with cross-attention, and norms around all sublayers."""
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
        """Build the encoder, the decoder and the LM head."""
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
    """T5Gemma: encoder and decoder with separate embeddings, and soft-capped logits."""

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


class GemmaAttention(SelfAttention):
    """Self-attention with Gemma's RMSNorm on each query and key head."""

    norm_type = GemmaRMSNorm


class Gemma3(Gemma2):
    """Settings of Gemma 3's decoder; only full-attention layers have long-context angles."""

    # Windowed layers keep the short-context base.
    layer_type_bases: ClassVar[LayerTypeBases | None] = LayerTypeBases(
        1000000.0, 10000.0, "rope_local_base_freq"
    )
    attn_logit_softcapping: Cap | None = None
    final_logit_softcapping: Cap | None = None
    rope_theta: RopeBase = 1000000.0
    rope_local_base_freq: RopeBase = 10000.0
    # Five windowed layers, then a full one.
    sliding_window_pattern: Positive = 6

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` has a sliding window: all layers but every sixth."""
        return (index + 1) % self.sliding_window_pattern != 0

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with per-head norms of queries and keys."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return GemmaAttention(site, spec, *sizes, self.rms_norm_eps, bias, bias)
