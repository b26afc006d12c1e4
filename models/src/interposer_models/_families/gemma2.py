"""Gemma 2: norms before and after each sublayer, capped scores and logits, alternating windows.

Source: arXiv:2408.00118.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Positive, WindowTokens
from interposer_ops.layers.norm import GemmaRMSNorm
from interposer_ops.sampling import logits_softcap

Cap = Annotated[float, Field(gt=0)]
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class CappedLM(CausalLM):
    """A decoder with optional soft-capping of the logits."""

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
        """The factor of embeddings."""
        return float(self.hidden_size**0.5)

    def slides(self, index: int) -> bool:
        """Return True for every second layer, beginning with the first."""
        return index % 2 == 0

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the attention, with the scale and the soft cap of scores."""
        spec, scale = super().attention_spec(site, index, page_size), self.query_pre_attn_scalar
        return replace(spec, scale=scale**-0.5, softcap=self.attn_logit_softcapping)

    def norm(self, site: Site) -> GemmaRMSNorm:
        """Build the norm at a site."""
        return GemmaRMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block that normalizes the inputs and outputs of attention and MLP."""
        return self.normed_block(site, index, page_size, NORMS)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        return CappedLM(site, self, page_size, self.final_logit_softcapping)

    @model_validator(mode="after")
    def _refuse_bidirectional_attention(self) -> Self:
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention is true, which is not computed")
        return self
