"""BLOOM: ALiBi (attention scores lowered by distance) instead of position embeddings.

Source: arXiv:2211.05100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import FusedAttention, FusedForm
from interposer_models._decoder.decoder import NormedBlock
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive

_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
_ROOT = "transformer."
_PARTS = ("word_embeddings.", "word_embeddings_layernorm.", "h.", "ln_f.")


class FirstBlock(nn.Module):
    """The first decoder block, which also normalises the embeddings."""

    def __init__(self, norm: LayerNorm, block: NormedBlock) -> None:
        super().__init__()
        self.norm, self.block = norm, block

    def forward(
        self, x: Tensor, residual: Tensor | None, *attention_inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Normalise the embeddings, then run the block."""
        return self.block(self.norm(x), residual, *attention_inputs)  # type: ignore[no-any-return]


class Bloom(MultiHeadFamily):
    """Settings of BLOOM and BLOOMZ, which also build the decoder; up to 1,048,576 positions."""

    frame = FrameNames(_ROOT[:-1], "word_embeddings", "ln_f", layers="h")
    attention_name = "self_attention"
    is_rotated = False

    # Replaced by _add_intermediate_size.
    intermediate_size: Positive = 1
    num_hidden_layers: int = Field(
        validation_alias=AliasChoices("n_layer", "num_hidden_layers"), gt=0, le=10_000
    )
    num_attention_heads: Positive = Field(
        validation_alias=AliasChoices("n_head", "num_attention_heads")
    )
    max_position_embeddings: Positive = 2**20
    layer_norm_epsilon: Epsilon = 1e-5
    tie_word_embeddings: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, and refuse residuals that are taken after the norms."""
        if config.get("apply_residual_connection_post_layernorm"):
            reason = "apply_residual_connection_post_layernorm is not computed"
            raise UnsupportedModelError(source, reason)
        return super().parse(config, source)

    def renamed(self, name: str) -> str | None:
        """Return the name of a checkpoint tensor with the prefix that early checkpoints omit."""
        return _ROOT + name if name.startswith(_PARTS) else name

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, with ALiBi."""
        return replace(super().attention_spec(site, index, page_size), alibi=True)

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_epsilon)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with LayerNorm before attention and before the MLP."""
        attention_site, hidden = site.at("self_attention"), self.hidden_size
        form = FusedForm(("query_key_value", "dense"), bias=True, by_head=True)
        attention = FusedAttention(
            attention_site, self.attention_spec(attention_site, index, page_size), hidden, form
        )
        names = ("dense_h_to_4h", "dense_4h_to_h")
        sizes = hidden, self.intermediate_size
        mlp = PlainMLP(site.at("mlp"), sizes, names, "gelu_pytorch_tanh", bias=True)
        block = NormedBlock(site, self.norm, _NORMS, attention, mlp)
        # Only the first block normalises the embeddings; the norm is stored outside of the blocks.
        if index:
            return block
        norm_site = replace(site, prefix=f"{_ROOT}word_embeddings_layernorm")
        return FirstBlock(self.norm(norm_site), block)

    @model_validator(mode="before")
    @classmethod
    def _add_intermediate_size(cls, fields: Any) -> Any:
        """Add the MLP's intermediate size, which no config states."""
        hidden = fields.get("hidden_size")
        return {**fields, "intermediate_size": 4 * hidden} if type(hidden) is int else fields
