"""StarCoder2: layer norms, an MLP without a gate, biases everywhere.

Source: arXiv:2402.19173.
"""

from __future__ import annotations

from pydantic import AliasChoices, Field
from torch import Tensor, nn

from interposer import Site
from interposer.errors import UnknownNameError
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_models._decoder.settings import Epsilon
from interposer_ops.activations import gelu
from interposer_ops.layers.linear import Linear

NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
_FORMS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}


class PlainMLP(nn.Module):
    """A projection, GELU, and a projection back."""

    def __init__(self, site: Site, sizes: tuple[int, int], activation: str, bias: bool) -> None:
        super().__init__()
        if activation not in _FORMS:
            raise UnknownNameError("activation", activation, _FORMS)
        hidden, inner = sizes
        self.form = _FORMS[activation]
        self.c_fc = Linear(site.at("c_fc"), hidden, inner, bias)
        self.gelu = site.at("act").bind(gelu, intermediate_size=inner, approximate=self.form)
        self.c_proj = Linear(site.at("c_proj"), inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        return self.c_proj(self.gelu(self.c_fc(x), self.form))  # type: ignore[no-any-return]


class Starcoder2(DecoderFamily):
    """StarCoder2."""

    norm_epsilon: Epsilon = 1e-5
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = Field(
        default=True, validation_alias=AliasChoices("use_bias", "attention_bias")
    )

    def slides(self, index: int) -> bool:
        """Say that every layer has the window, if there is one."""
        return True

    def norm(self, site: Site) -> LayerNorm:
        """Return the norm at a site."""
        return LayerNorm(site, self.hidden_size, self.norm_epsilon)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        return PlainMLP(block.at("mlp"), sizes, self.hidden_act, self.attention_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return the block with layer norms."""
        return self.normed_block(site, index, page_size, NORMS)
