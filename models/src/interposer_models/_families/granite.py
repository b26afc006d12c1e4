"""IBM's Granite and Bamba: dense decoders, decoders with MoE layers, or with Mamba-2 mixers.

Granite is Llama with multipliers of embeddings, scores, block outputs and logits. Granite MoE has
MoE layers instead of MLPs. Bamba has Mamba-2 mixers, and attention in a few layers.

Source: arXiv:2405.04324 (Granite; the multipliers are those of arXiv:2203.03466),
huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct, huggingface.co/blog/bamba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.decoder import Block, CausalLM, NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.recurrent import StateSpaceMixer, StateSpaceSizes
from interposer_models._decoder.settings import (
    Epsilon,
    FrameNames,
    Positive,
    Share,
    Steps,
    Window,
    check_convolution,
    check_state,
)
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention

Multiplier = Annotated[float, Field(gt=0)]


class ScaledBlock(DecoderBlock):
    """Decoder block that scales each sublayer's output before adding it to the residual stream."""

    def __init__(
        self,
        site: Site,
        sizes: tuple[int, float],
        parts: tuple[Callable[[Site], SelfAttention], Callable[[Site], nn.Module]],
        multiplier: float,
    ) -> None:
        super().__init__(site, *sizes, *parts)
        self.multiplier = multiplier

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the residual stream."""
        x, residual = self.input_layernorm.forward_add(x, residual)
        x = self.self_attn(x, cos, sin, cache, plan, rows) * self.multiplier
        if rows is not None:
            residual = residual[rows]
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp(x) * self.multiplier, residual


class ScaledLM(CausalLM):
    """A decoder and LM head whose logits are divided by a constant."""

    def __init__(self, site: Site, config: DecoderFamily, block: Block, divisor: float) -> None:
        super().__init__(site, config, block, config.norm)
        self.divisor = divisor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        return super().forward(*args, **kwargs) / self.divisor


class Granite(DecoderFamily):
    """Settings of Granite 3's dense models, which also build the decoder."""

    attention_multiplier: Multiplier = 1.0
    embedding_multiplier: Multiplier = 1.0
    logits_scaling: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return self.embedding_multiplier

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, whose score scale is ``attention_multiplier``."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, scale=self.attention_multiplier)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block that multiplies sublayer outputs by ``residual_multiplier``."""

        def attention(attention_site: Site) -> SelfAttention:
            return self.self_attention(
                attention_site, index, self.attention_spec(attention_site, index, page_size)
            )

        sizes, parts = (
            (self.hidden_size, self.rms_norm_eps),
            (attention, lambda _: self.mlp(site, index)),
        )
        return ScaledBlock(site, sizes, parts, self.residual_multiplier)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head that divides the logits."""
        scale = self.logits_scaling
        return ScaledLM(site, self, lambda at, index: self.block(at, index, page_size), scale)


# Before and after the mixer, before and after the MLP, as in ``NormedBlock``.
NORMS = ("input_layernorm", "", "pre_ff_layernorm", "")


class Bamba(DecoderFamily):
    """Settings of Bamba, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    frame: ClassVar[FrameNames] = FrameNames(norm="final_layernorm")

    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: Share = 0.5
    attn_layer_indices: tuple[int, ...] | None = None
    mamba_n_heads: Positive = 128
    mamba_d_head: Positive | Literal["auto"] = "auto"
    mamba_n_groups: Positive = 1
    mamba_d_state: Positive = 256
    mamba_d_conv: Window = 4
    mamba_expand: Positive = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Steps = (0.0, float("inf"))

    @property
    def state_width(self) -> int:
        """Number of elements of all heads of a Mamba-2 mixer."""
        return self.mamba_expand * self.hidden_size

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention, not a Mamba-2 mixer."""
        return index in (self.attn_layer_indices or ())

    def mixer_sizes(self) -> StateSpaceSizes:
        """Return the sizes of the Mamba-2 mixers."""
        return StateSpaceSizes(
            self.hidden_size,
            self.mamba_n_heads,
            self.state_width // self.mamba_n_heads,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_proj_bias,
            self.mamba_conv_bias,
            self.time_step_limit,
        )

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP of a decoder block."""
        sizes = self.hidden_size, self.intermediate_size
        return GatedMLP(block.at("feed_forward"), *sizes, self.hidden_act, self.mlp_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with a Mamba-2 mixer, or with attention."""
        if self.attends(index):
            return self.normed_block(site, index, page_size, NORMS)
        mixer = StateSpaceMixer(site.at("mamba"), self.mixer_sizes(), self.rms_norm_eps)
        return NormedBlock(site, self.norm, NORMS, mixer, self.mlp(site, index))

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        heads, groups, width = self.mamba_n_heads, self.mamba_n_groups, self.state_width
        if width % heads or self.mamba_d_head not in ("auto", width // heads):
            raise ValueError(
                f"the state's width {width} is not mamba_n_heads {heads} times mamba_d_head "
                f"{self.mamba_d_head}"
            )
        if heads % groups:
            raise ValueError(f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}")
        check_state(heads, width // heads, self.mamba_d_state)
        check_convolution("hidden_act", self.hidden_act)
        return self


# Checkpoints store all experts' matrices as one tensor, named like a linear layer.
_STORED_AS = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


class GraniteMoe(MixtureFamily, Granite):
    """Settings of Granite 3's MoE models, whose checkpoints stack the experts' matrices."""

    num_local_experts: Positive | None = count_of_experts(8)
    num_experts_per_tok: Positive | None = 2

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer, in which the weights of a token's experts sum to 1."""
        moe_site = block.at("block_sparse_moe")
        moe = MixtureMLP(moe_site, self.experts(), "router.layer", renormalize=True)
        for name, parameter in moe.experts.named_parameters():
            if name in _STORED_AS:
                parameter.stored_as = f"{moe_site.prefix}.{_STORED_AS[name]}"  # type: ignore[attr-defined]
        return moe
