"""GPT-2: learned positions, layer norms, one transposed projection of queries, keys and values.

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
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.fused_attention import FusedAttention, FusedForm
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive
from interposer_models._decoder.transposed_linear import TransposedLinear
from interposer_models._decoder.whole_heads import WholeHeads

_NORMS = ("ln_1", "", "ln_2", "")
# Masks that older checkpoints hold, which follow from the context.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_ROOT = "transformer."


def _also(name: str, other: str, **default: Any) -> Any:
    return Field(validation_alias=AliasChoices(name, other), **default)


class GPT2(WholeHeads):
    """GPT-2 and what is stored as such."""

    frame = FrameNames("transformer", "wte", "ln_f", layers="h", positions="wpe")
    attention_name = "attn"

    hidden_size: Positive = _also("n_embd", "hidden_size")
    # In config.json null stands for four times the hidden size.
    intermediate_size: Positive = _also("n_inner", "intermediate_size", default=1)
    num_hidden_layers: int = _also("n_layer", "num_hidden_layers", gt=0, le=10_000)
    num_attention_heads: Positive = _also("n_head", "num_attention_heads")
    max_position_embeddings: Positive = _also("n_positions", "max_position_embeddings")
    hidden_act: str = _also("activation_function", "hidden_act", default="gelu_new")
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Return the settings of config.json; a model with cross attention is refused."""
        if config.get("add_cross_attention"):
            raise UnsupportedModelError(source, "add_cross_attention is not computed")
        return super().parse(config, source)

    def renamed(self, name: str) -> str | None:
        """Return the name with the part in front that the first checkpoints leave out."""
        below = name.removeprefix(_ROOT)
        if _MASK.fullmatch(below):
            return None
        return _ROOT + below if below.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return what attention has to do; the scale may be that of the layer."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        return replace(super().attention_spec(site, index, page_size), scale=scale)

    def norm(self, site: Site) -> LayerNorm:
        """Return the norm at a site."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_epsilon)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return the block with layer norms before its parts."""
        at, hidden = site.at("attn"), self.hidden_size
        form = FusedForm(("c_attn", "c_proj"), bias=True, linear=TransposedLinear)
        attention = FusedAttention(at, self.attention_spec(at, index, page_size), hidden, form)
        sizes, names = (hidden, self.intermediate_size), ("c_fc", "c_proj")
        mlp = PlainMLP(site.at("mlp"), sizes, names, self.hidden_act, True, TransposedLinear)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)

    @model_validator(mode="before")
    @classmethod
    def _with_inner(cls, fields: Any) -> Any:
        """Add the inner size where it is null."""
        if fields.get("n_inner") or fields.get("intermediate_size"):
            return fields
        hidden = fields.get("n_embd", fields.get("hidden_size"))
        return {**fields, "n_inner": 4 * hidden} if type(hidden) is int else fields
