"""StarCoder2: layer norms, an MLP without a gate, and biases in all projections.

Source: arXiv:2402.19173.
"""

from __future__ import annotations

from pydantic import AliasChoices, Field
from torch import nn

from interposer import Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import Epsilon

NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
_MLP = ("c_fc", "c_proj")


class Starcoder2(DecoderFamily):
    """Settings of StarCoder2, which also build the decoder."""

    norm_epsilon: Epsilon = 1e-5
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    # One field, use_bias, is for attention and MLP alike.
    attention_bias: bool = Field(
        default=True, validation_alias=AliasChoices("use_bias", "attention_bias")
    )

    def slides(self, index: int) -> bool:
        """Return True: every layer has a sliding window, if the config states one."""
        return True

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.norm_epsilon)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MLP of a decoder block, without a gate."""
        sizes = self.hidden_size, self.intermediate_size
        return PlainMLP(block.at("mlp"), sizes, _MLP, self.hidden_act, self.attention_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with LayerNorm before attention and before the MLP."""
        return self.normed_block(site, index, page_size, NORMS)
