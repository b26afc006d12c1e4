"""MPT: ALiBi instead of position embeddings; optionally a prefix LM.

Source: MosaicML, "Introducing MPT-7B" (2023), and the program llm-foundry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import FusedAttention, FusedForm
from interposer_models._decoder.decoder import NormedBlock
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive

_NORMS = ("norm_1", "", "norm_2", "")
_FORM = FusedForm(("Wqkv", "out_proj"), bias=False)
# The only supported values of these fields of config.json and of its attn_config.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (None,),
    "no_bias": (True, None),
    "norm_type": ("low_precision_layernorm", "layernorm", None),
}
_SUPPORTED_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention", None),
    "qk_gn": (False, None),
    "qk_ln": (False, None),
    "rope": (False, None),
    "sliding_window_size": (-1, None),
}


class MptAttentionSettings(BaseModel):
    """The fields of ``attn_config`` in the config of MPT.

    Attributes:
        alibi_bias_max: the smallest slope is 2 to the power of minus this number.
        clip_qkv: queries, keys and values are clipped to this magnitude; None and 0 mean no
            clipping.
        softmax_scale: factor of the scores; None means one over the square root of the head size.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    alibi_bias_max: Annotated[float, Field(gt=0, le=1024)] = 8.0
    clip_qkv: Annotated[float, Field(ge=0)] | None = None
    prefix_lm: bool = False
    softmax_scale: Annotated[float, Field(gt=0, le=1e4)] | None = None


class MptAttention(FusedAttention):
    """Self-attention that clips queries, keys and values."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, clip: float) -> None:
        super().__init__(site, spec, hidden_size, _FORM)
        self.clip = clip

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute clipped query, key and value ``[T, N, D]`` (T tokens, N heads, D head size)."""
        query, key, value = (
            part.clamp(-self.clip, self.clip) for part in super().heads(x, cos, sin)
        )
        return query, key, value


class Mpt(MultiHeadFamily):
    """Settings of MPT; with ``prefix_lm``, prompt tokens also attend to later prompt tokens."""

    frame = FrameNames("transformer", "wte", "norm_f", layers="blocks")
    attention_name = "attn"
    is_rotated = False

    hidden_size: Positive = Field(validation_alias=AliasChoices("d_model", "hidden_size"))
    # Not used: the MLP's size is expansion_ratio times the hidden size.
    intermediate_size: Positive = 1
    num_hidden_layers: int = Field(
        validation_alias=AliasChoices("n_layers", "num_hidden_layers"), gt=0, le=10_000
    )
    num_attention_heads: Positive = Field(
        validation_alias=AliasChoices("n_heads", "num_attention_heads")
    )
    max_position_embeddings: Positive = Field(
        default=2048, validation_alias=AliasChoices("max_seq_len", "max_position_embeddings")
    )
    expansion_ratio: Annotated[int, Field(gt=0, le=1024)] = 4
    layer_norm_epsilon: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attn_config: MptAttentionSettings = MptAttentionSettings()

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, and refuse unsupported values."""
        attention_fields = config.get("attn_config")
        attention = attention_fields if isinstance(attention_fields, dict) else {}
        for field_prefix, fields, supported in (
            ("", config, _SUPPORTED),
            ("attn_config.", attention, _SUPPORTED_ATTENTION),
        ):
            for name in supported.keys() & fields.keys():
                if fields[name] not in supported[name]:
                    reason = f"{field_prefix}{name} is {fields[name]!r}, which is not supported"
                    raise UnsupportedModelError(source, reason)
        return super().parse(config, source)

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, with ALiBi and the fields of ``attn_config``."""
        spec, attention = super().attention_spec(site, index, page_size), self.attn_config
        return replace(
            spec,
            scale=attention.softmax_scale or spec.scale,
            alibi=True,
            alibi_bias_max=attention.alibi_bias_max,
            prefix_lm=attention.prefix_lm,
        )

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm without bias for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_epsilon, bias=False)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with LayerNorm before attention and before the MLP."""
        attention_site, hidden, clip = site.at("attn"), self.hidden_size, self.attn_config.clip_qkv
        spec = self.attention_spec(attention_site, index, page_size)
        attention = (
            MptAttention(attention_site, spec, hidden, clip)
            if clip
            else FusedAttention(attention_site, spec, hidden, _FORM)
        )
        sizes = hidden, self.expansion_ratio * hidden
        mlp = PlainMLP(site.at("ffn"), sizes, ("up_proj", "down_proj"), "gelu", bias=False)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)
