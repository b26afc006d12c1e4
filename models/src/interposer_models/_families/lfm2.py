"""LFM2: gated short convolutions, and attention in some layers.

Source: LFM2 Technical Report, arXiv:2511.23404.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Field
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.recurrent import Convolution, RecurrentMixer
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive, RopeBase
from interposer_models._decoder.state_settings import Window
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.states import StateBatch, StateLayout

_NORMS = ("operator_norm", "", "ffn_norm", "")


class ShortConvolution(RecurrentMixer):
    """The output projection of c * conv(b * x), where b, c and x are projections of the input."""

    def __init__(self, site: Site, hidden_size: int, window: int, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(site.at("in_proj"), hidden_size, 3 * hidden_size, bias)
        self.conv = Convolution(site.at("conv"), hidden_size, window, bias, silu=False)
        self.out_proj = Linear(site.at("out_proj"), hidden_size, hidden_size, bias)

    def state_layout(self) -> StateLayout:
        """Return a sequence's state: the convolution's last inputs."""
        return StateLayout((self.conv.state,))

    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Run the convolution; return the output ``[T, H]`` and the gate c."""
        input_gate, output_gate, x = self.in_proj(x).chunk(3, dim=-1)
        return self.conv(input_gate * x, *cache, plan), output_gate

    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate and the output projection: ``[T, H]``."""
        return self.out_proj(gate * y)  # type: ignore[no-any-return]


class Lfm2Attention(SelfAttention):
    """Attention with per-head norms, under LFM2's parameter names."""

    part_names = ("out_proj", "q_layernorm", "k_layernorm")


class Lfm2MLP(GatedMLP):
    """A gated MLP under LFM2's parameter names."""

    part_names = ("w1", "w3", "w2")


class Lfm2(DecoderFamily):
    """Settings of LFM2, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    frame: ClassVar[FrameNames] = FrameNames(norm="embedding_norm")

    rms_norm_eps: Epsilon = Field(
        default=1e-5, validation_alias=AliasChoices("norm_eps", "rms_norm_eps")
    )
    rope_theta: RopeBase = 1000000.0
    tie_word_embeddings: bool = Field(
        default=True, validation_alias=AliasChoices("tie_word_embeddings", "tie_embedding")
    )
    intermediate_size: Positive = Field(
        default=12288, validation_alias=AliasChoices("block_ff_dim", "intermediate_size")
    )
    layer_types: tuple[Literal["full_attention", "conv"], ...] | None = None  # type: ignore[assignment]
    full_attn_idxs: tuple[int, ...] | None = None
    conv_L_cache: Window = 3
    conv_bias: bool = False
    block_multiple_of: Positive = 256
    block_ffn_dim_multiplier: Annotated[float, Field(gt=0, le=64)] = 1.0
    block_auto_adjust_ff_dim: bool = True

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention, not a convolution."""
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return self.full_attn_idxs is None or index in self.full_attn_idxs

    @property
    def inner_size(self) -> int:
        """Intermediate size of the gated MLP, computed from the ungated size in the config."""
        size = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        # A gated MLP has three matrices instead of two, so 2/3 of the size keeps the weight count.
        size = int(self.block_ffn_dim_multiplier * int(2 * size / 3))
        # Round up to a multiple.
        return -(-size // self.block_multiple_of) * self.block_multiple_of

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with per-head norms of queries and keys."""
        return Lfm2Attention(site, spec, self.hidden_size, self.rotary_size, self.rms_norm_eps)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MLP below a block's site."""
        return Lfm2MLP(block.at("feed_forward"), self.hidden_size, self.inner_size, "silu")

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with a convolution or attention."""
        if self.attends(index):
            return self.normed_block(site, index, page_size, _NORMS)
        sizes = self.hidden_size, self.conv_L_cache
        mixer = ShortConvolution(site.at("conv"), *sizes, self.conv_bias)
        return NormedBlock(site, self.norm, _NORMS, mixer, self.mlp(site, index))
