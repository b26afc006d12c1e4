"""OPT: learned positions, layer norms, an MLP of ReLU, biases.

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
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import FrameNames, Positive
from interposer_models._decoder.whole_heads import WholeHeads

_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_EPS = 1e-5
# The only values that are computed.
_USUAL = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


class OPTAttention(UnrotatedAttention):
    """Attention whose last projection has a name of its own."""

    part_names = ("out_proj", "q_norm", "k_norm")


class OPT(WholeHeads):
    """OPT with norms before its parts, which are all sizes but that of 350 million weights."""

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
        attention = OPTAttention(at, spec, self.hidden_size, 0, None, bias, bias)
        sizes = self.hidden_size, self.intermediate_size
        mlp = PlainMLP(site, sizes, ("fc1", "fc2"), self.hidden_act, bias)
        return NormedBlock(site, self.norm, _NORMS, attention, mlp)
