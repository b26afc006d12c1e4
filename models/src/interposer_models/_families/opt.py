"""OPT: learned positions, layer norms, an MLP of ReLU, biases.

Source: arXiv:2205.01068.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import AliasChoices, Field
from torch import nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import Unrotated
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_models._decoder.named_decoder import NamedFamily, PartNames
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.self_attention import SelfAttention

_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_EPS = 1e-5
# The only values that are computed.
_USUAL = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


class OPTAttention(SelfAttention):
    """Attention without rotation, whose last projection has a name of its own."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, bias: bool) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        width = spec.num_heads * size
        self.sizes = (width, width, width)
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv_proj = MergedLinear(site.at("qkv_proj"), hidden_size, parts, bias)
        self.o_proj = Linear(site.at("out_proj"), width, hidden_size, bias)
        self.q_norm = self.k_norm = None
        self.rotary = Unrotated(site.at("rotary"), size, 0)
        self.attn = Attention(site.at("attn"), spec)


class OPT(NamedFamily):
    """OPT with norms before its parts, which are all sizes but that of 350 million weights."""

    names = PartNames(
        tokens="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        blocks="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        head="lm_head",
        attention="self_attn",
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
        """Return the settings of config.json; norms behind the parts are refused."""
        for name, usual in _USUAL.items():
            if config.get(name, usual) not in (usual, None):
                reason = f"{name} is {config[name]!r}, which is not computed"
                raise UnsupportedModelError(source, reason)
        parsed = super().parse(config, source)
        embedded = config.get("word_embed_proj_dim") or parsed.hidden_size
        if embedded != parsed.hidden_size:
            reason = f"word_embed_proj_dim is {embedded!r}, which is not computed"
            raise UnsupportedModelError(source, reason)
        return parsed

    def renamed(self, name: str) -> str | None:
        """Return the name with the part in front that the first checkpoints leave out."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def norm(self, site: Site) -> LayerNorm:
        """Return the norm at a site."""
        return LayerNorm(site, self.hidden_size, _EPS)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return the block with layer norms before its parts; the MLP has no name."""
        at, bias = site.at("self_attn"), self.enable_bias
        spec = self.attention_spec(at, index, page_size)
        attention = OPTAttention(at, spec, self.hidden_size, bias)
        sizes = self.hidden_size, self.intermediate_size
        mlp = PlainMLP(site, sizes, ("fc1", "fc2"), self.hidden_act, bias)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)
