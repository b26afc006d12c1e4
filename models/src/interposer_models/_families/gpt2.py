"""GPT-2: learned positions, layer norms, and a QKV projection that is stored transposed.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import AliasChoices, Field, model_validator
from torch import nn

from interposer import AttentionSpec, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import FusedAttention, FusedForm
from interposer_models._decoder.decoder import NormedBlock
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP, TransposedLinear
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive

_NORMS = ("ln_1", "", "ln_2", "")
# Causal masks, which older checkpoints contain although they follow from the context length.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_ROOT = "transformer."


def _field_with_alias(name: str, alias: str, **default: Any) -> Any:
    return Field(validation_alias=AliasChoices(name, alias), **default)


class GPT2(MultiHeadFamily):
    """Settings of GPT-2 and models in its format, which also build the decoder."""

    frame = FrameNames("transformer", "wte", "ln_f", layers="h", positions="wpe")
    attention_name = "attn"

    hidden_size: Positive = _field_with_alias("n_embd", "hidden_size")
    # In config.json null stands for four times the hidden size.
    intermediate_size: Positive = _field_with_alias("n_inner", "intermediate_size", default=1)
    num_hidden_layers: int = _field_with_alias("n_layer", "num_hidden_layers", gt=0, le=10_000)
    num_attention_heads: Positive = _field_with_alias("n_head", "num_attention_heads")
    max_position_embeddings: Positive = _field_with_alias("n_positions", "max_position_embeddings")
    hidden_act: str = _field_with_alias("activation_function", "hidden_act", default="gelu_new")
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, and refuse models with cross-attention."""
        if config.get("add_cross_attention"):
            raise UnsupportedModelError(source, "add_cross_attention is not computed")
        return super().parse(config, source)

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name with the prefix that early checkpoints omit; None for a mask."""
        base_name = name.removeprefix(_ROOT)
        if _MASK.fullmatch(base_name):
            return None
        return _ROOT + base_name if base_name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec; the score scale may depend on the layer."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        return replace(super().attention_spec(site, index, page_size), scale=scale)

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_epsilon)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with LayerNorm before attention and before the MLP."""
        attention_site, hidden = site.at("attn"), self.hidden_size
        form = FusedForm(("c_attn", "c_proj"), bias=True, linear=TransposedLinear)
        attention = FusedAttention(
            attention_site, self.attention_spec(attention_site, index, page_size), hidden, form
        )
        sizes, names = (hidden, self.intermediate_size), ("c_fc", "c_proj")
        mlp = PlainMLP(site.at("mlp"), sizes, names, self.hidden_act, True, TransposedLinear)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)

    @model_validator(mode="before")
    @classmethod
    def _add_intermediate_size(cls, fields: Any) -> Any:
        """Replace a null intermediate size by the default of four times the hidden size."""
        if fields.get("n_inner") or fields.get("intermediate_size"):
            return fields
        hidden = fields.get("n_embd", fields.get("hidden_size"))
        return {**fields, "n_inner": 4 * hidden} if type(hidden) is int else fields
