"""OPT: learned positions, layer norms, biases, and a ReLU MLP without a gate.

Source: arXiv:2205.01068.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import AliasChoices, Field
from torch import nn

from interposer import Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.decoder import NormedBlock
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import FrameNames, Positive

_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_EPS = 1e-5
# The only supported values of these fields.
_SUPPORTED = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


class OPTAttention(UnrotatedAttention):
    """Self-attention without rotary embedding, with OPT's parameter names."""

    part_names = ("out_proj", "q_norm", "k_norm")


class OPT(MultiHeadFamily):
    """Settings of OPT with pre-norm blocks (all sizes except 350M), which build the decoder."""

    frame = FrameNames(
        "model.decoder",
        norm="final_layer_norm",
        positions="embed_positions",
        first_position=2,
    )

    intermediate_size: Positive = Field(
        default=3072, validation_alias=AliasChoices("ffn_dim", "intermediate_size")
    )
    hidden_act: str = Field(
        default="relu", validation_alias=AliasChoices("activation_function", "hidden_act")
    )
    enable_bias: bool = True
    tie_word_embeddings: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, and refuse norms after the sublayers."""
        for name, supported in _SUPPORTED.items():
            if config.get(name, supported) not in (supported, None):
                reason = f"{name} is {config[name]!r}, which is not supported"
                raise UnsupportedModelError(source, reason)
        parsed = super().parse(config, source)
        embedding_size = config.get("word_embed_proj_dim") or parsed.hidden_size
        if embedding_size != parsed.hidden_size:
            reason = f"word_embed_proj_dim is {embedding_size!r}, which is not supported"
            raise UnsupportedModelError(source, reason)
        return parsed

    def renamed(self, name: str) -> str | None:
        """Return the name of a checkpoint tensor with the prefix that early checkpoints omit."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, _EPS)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with LayerNorm before attention and before the MLP."""
        attention_site, bias = site.at("self_attn"), self.enable_bias
        spec = self.attention_spec(attention_site, index, page_size)
        # A rotary size of 0: positions are embedded, queries and keys are not rotated.
        attention = OPTAttention(attention_site, spec, self.hidden_size, 0, None, bias, bias)
        sizes = self.hidden_size, self.intermediate_size
        mlp = PlainMLP(site, sizes, ("fc1", "fc2"), self.hidden_act, bias)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)
