"""Decoders with recurrent layers: Mamba-2, Nemotron-H, Falcon-H1 and LFM2.

Mamba-2 has state space mixers only, without attention and without MLPs. Nemotron-H has one sublayer
per block: a mixer, an MLP, an MoE layer or attention. Falcon-H1 runs attention and a mixer in
parallel in every block, with many multipliers. LFM2 has gated short convolutions, and attention in
some layers.

Source: arXiv:2405.21060 (Mamba-2), arXiv:2504.03624 and transformers' ``nemotron_h`` (Nemotron-H),
arXiv:2507.22448 (Falcon-H1), arXiv:2511.23404 (LFM2).

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.decoder import CausalLM, NormedBlock, OnePartBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.layers import PlainMLP
from interposer_models._decoder.moe import LARGEST_TENSOR, MOST_EXPERTS, Grouping, UngatedMoE
from interposer_models._decoder.recurrent import (
    Convolution,
    RecurrentMixer,
    StateSpaceMixer,
    StateSpaceSizes,
)
from interposer_models._decoder.settings import (
    Epsilon,
    FrameNames,
    Positive,
    RopeBase,
    Share,
    Steps,
    Window,
    check_convolution,
    check_state,
)
from interposer_models._families.granite import NORMS, Bamba, Multiplier, ScaledLM
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.states import StateBatch, StateLayout

# The letters of hybrid_override_pattern.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# The names that newer configs use.
_NEW_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


class UncachedSublayer(nn.Module):
    """Adapter that gives an MLP or MoE layer the call signature of attention."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self, x: Tensor, cos: object, sin: object, cache: object, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Compute ``[T, H]`` from ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens in ``rows``."""
        return self.mlp(x if rows is None else x[rows])  # type: ignore[no-any-return]


class NemotronH(DecoderFamily):
    """Settings of Nemotron-H, which build the decoder without MTP layers."""

    frame: ClassVar[FrameNames] = FrameNames("backbone", "embeddings", "norm_f")
    attention_name = "mixer"

    head_dim: Positive | None = 128
    rms_norm_eps: Epsilon = Field(
        default=1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "rms_norm_eps")
    )
    hidden_act: str = Field(
        default="relu2", validation_alias=AliasChoices("mlp_hidden_act", "hidden_act")
    )
    mamba_hidden_act: str = "silu"
    layers_block_type: tuple[Literal["mamba", "attention", "mlp", "moe"], ...]
    # ``parse`` moves the field to layers_block_type, as its values are not attention types here.
    layer_types: None = None
    hybrid_override_pattern: str | None = None
    ssm_state_size: Positive = 128
    mamba_num_heads: Positive = 128
    mamba_head_dim: Positive = 64
    n_groups: Positive = Field(
        default=8, validation_alias=AliasChoices("mamba_n_groups", "n_groups")
    )
    conv_kernel: Window = Field(
        default=4, validation_alias=AliasChoices("mamba_d_conv", "conv_kernel")
    )
    use_conv_bias: bool = Field(
        default=True, validation_alias=AliasChoices("mamba_conv_bias", "use_conv_bias")
    )
    use_bias: bool = False
    time_step_min: float = Field(
        default=0.001, ge=0, validation_alias=AliasChoices("mamba_dt_min", "time_step_min")
    )
    n_routed_experts: Annotated[int, Field(gt=0, le=MOST_EXPERTS)] = 8
    num_experts_per_tok: Positive = 2
    moe_intermediate_size: Positive = 7688
    moe_shared_expert_intermediate_size: Positive = 7688
    moe_latent_size: Positive | None = None
    n_group: Positive = 1
    topk_group: Positive = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate config.json, after merging three ways to state the kinds of layers."""
        layer_kinds = config.get("layers_block_type") or config.get("layer_types")
        pattern = config.get("hybrid_override_pattern")
        if not layer_kinds and isinstance(pattern, str):
            layer_kinds = [_KINDS.get(letter, letter) for letter in pattern]
        if not isinstance(layer_kinds, list):
            return super().parse({**config, "layer_types": None}, source)
        kinds = [
            _NEW_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in layer_kinds
        ]
        # Some configs leave the number of layers to the list.
        count = {"num_hidden_layers": len(kinds)}
        merged = {**count, **config, "layer_types": None, "layers_block_type": kinds}
        return super().parse(merged, source)

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention."""
        return self.layers_block_type[index] == "attention"

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block of one norm and one sublayer: mixer, attention, MLP or MoE layer."""
        sublayer: nn.Module
        mixer_site, kind = site.at("mixer"), self.layers_block_type[index]
        if kind == "attention":
            spec = self.attention_spec(mixer_site, index, page_size)
            sublayer = UnrotatedAttention(mixer_site, spec, self.hidden_size, self.rotary_size)
        elif kind == "mlp":
            mlp_sizes = self.hidden_size, self.intermediate_size
            mlp = PlainMLP(
                mixer_site, mlp_sizes, ("up_proj", "down_proj"), self.hidden_act, self.mlp_bias
            )
            sublayer = UncachedSublayer(mlp)
        elif kind == "moe":
            sublayer = UncachedSublayer(self.mixture(mixer_site))
        else:
            sizes = StateSpaceSizes(
                self.hidden_size,
                self.mamba_num_heads,
                self.mamba_head_dim,
                self.n_groups,
                self.ssm_state_size,
                self.conv_kernel,
                self.use_bias,
                self.use_conv_bias,
                (self.time_step_min, float("inf")),
            )
            sublayer = StateSpaceMixer(mixer_site, sizes, self.rms_norm_eps)
        return OnePartBlock(site, self.norm, "norm", sublayer)

    def mixture(self, site: Site) -> UngatedMoE:
        """Build the MoE layer, with experts that have no gate."""
        spec = ExpertsSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            activation=self.hidden_act,
        )
        groups = self.n_group, self.topk_group
        grouping = Grouping(*groups, self.norm_topk_prob, self.routed_scaling_factor)
        sizes = self.moe_shared_expert_intermediate_size, self.moe_latent_size or 0
        return UngatedMoE(site, spec, grouping, *sizes, self.mlp_bias)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder without the MTP layers of the checkpoint."""
        model = super().build(site, page_size)
        model.unread = ("mtp.",)
        return model

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if "moe" not in self.layers_block_type:
            return self
        num_experts, num_groups, top_groups = self.n_routed_experts, self.n_group, self.topk_group
        if self.hidden_act != "relu2":
            raise ValueError(
                f"mlp_hidden_act is {self.hidden_act!r}, experts without a gate have 'relu2'"
            )
        expert_sizes = self.moe_latent_size or self.hidden_size, self.moe_intermediate_size
        if num_experts * expert_sizes[0] * expert_sizes[1] > LARGEST_TENSOR:
            raise ValueError(
                f"{num_experts} experts of {expert_sizes} exceed the limit of "
                f"{LARGEST_TENSOR} elements"
            )
        if num_experts % num_groups or num_experts < 2 * num_groups:
            raise ValueError(f"{num_experts} experts are not {num_groups} groups of at least two")
        if top_groups > num_groups:
            raise ValueError(f"topk_group {top_groups} exceeds n_group {num_groups}")
        if self.num_experts_per_tok > top_groups * (num_experts // num_groups):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the experts of "
                f"{top_groups} groups of {num_experts // num_groups}"
            )
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        num_kinds = len(self.layers_block_type)
        if num_kinds != self.num_hidden_layers:
            raise ValueError(
                f"layers_block_type has {num_kinds} of {self.num_hidden_layers} layers"
            )
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(
                f"mamba_num_heads {self.mamba_num_heads} is not a multiple of n_groups "
                f"{self.n_groups}"
            )
        check_state(self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size)
        check_convolution("mamba_hidden_act", self.mamba_hidden_act)
        return self


# The config states no context length, and the cost of a step does not grow with the context.
_CONTEXT = 2**20


class Mamba2(DecoderFamily):
    """Settings of Mamba-2 language models, which also build the decoder."""

    frame: ClassVar[FrameNames] = FrameNames("backbone", "embeddings", "norm_f")

    num_attention_heads: Positive = Field(
        default=128, validation_alias=AliasChoices("num_heads", "num_attention_heads")
    )
    head_dim: Positive | None = 64
    # There are no MLPs; the base class requires a value.
    intermediate_size: Positive = 1
    max_position_embeddings: Positive = _CONTEXT
    rms_norm_eps: Epsilon = Field(
        default=1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "rms_norm_eps")
    )
    state_size: Positive = 128
    n_groups: Positive = 8
    conv_kernel: Window = 4
    expand: Positive = 2
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_limit: Steps = (0.0, float("inf"))

    def attends(self, index: int) -> bool:
        """Return False: no block has attention."""
        return False

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block of one norm and one Mamba-2 mixer."""
        sizes = StateSpaceSizes(
            self.hidden_size,
            self.num_attention_heads,
            self.head_size,
            self.n_groups,
            self.state_size,
            self.conv_kernel,
            self.use_bias,
            self.use_conv_bias,
            self.time_step_limit,
        )
        mixer = StateSpaceMixer(site.at("mixer"), sizes, self.rms_norm_eps)
        return OnePartBlock(site, self.norm, "norm", mixer)

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        heads, groups = self.num_attention_heads, self.n_groups
        if heads % groups:
            raise ValueError(f"num_heads {heads} is not a multiple of n_groups {groups}")
        if self.hidden_size * self.expand != heads * self.head_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} times expand {self.expand} is not num_heads "
                f"{heads} times head_dim {self.head_size}"
            )
        check_state(heads, self.head_size, self.state_size)
        check_convolution("hidden_act", self.hidden_act)
        return self


class ScaledMLP(GatedMLP):
    """Gated MLP with a factor on the gate before the activation, and one on the output."""

    factors = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        inner = self.activation(torch.cat((gate * self.factors[0], up), dim=-1))
        return self.down_proj(inner) * self.factors[1]  # type: ignore[no-any-return]


class ParallelMixer(nn.Module):
    """Sum of attention and a Mamba-2 mixer that read the same input, each with a scale.

    Args:
        factors: factors of the inputs of attention and mixer, then of their outputs.
    """

    def __init__(
        self, attention: nn.Module, mixer: nn.Module, factors: tuple[float, float, float, float]
    ) -> None:
        super().__init__()
        self.attention, self.mixer, self.factors = attention, mixer, factors

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: list[Any],
        plan: list[Any],
        rows: Tensor | None,
    ) -> Tensor:
        """Compute ``[T, H]`` from ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens in ``rows``."""
        attention_in, mixer_in, attention_out, mixer_out = self.factors
        attended = self.attention(x * attention_in, cos, sin, cache[0], plan[0], rows)
        mixed = self.mixer(x * mixer_in, cos, sin, cache[1], plan[1], rows)
        return attended * attention_out + mixed * mixer_out  # type: ignore[no-any-return]


class FalconH1(Bamba):
    """Settings of Falcon-H1, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = False
    partial_rotary_factor: Share = 1.0
    mamba_d_ssm: Positive | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    projectors_bias: bool = False
    lm_head_multiplier: Multiplier = 1.0
    embedding_multiplier: Multiplier = 1.0
    key_multiplier: Multiplier = 1.0
    attention_in_multiplier: Multiplier = 1.0
    attention_out_multiplier: Multiplier = 1.0
    ssm_in_multiplier: Multiplier = 1.0
    ssm_out_multiplier: Multiplier = 1.0
    mlp_multipliers: tuple[Multiplier, Multiplier] = (1.0, 1.0)
    ssm_multipliers: tuple[Multiplier, Multiplier, Multiplier, Multiplier, Multiplier] = (
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    )

    @property
    def state_width(self) -> int:
        """Number of elements of all heads of a Mamba-2 mixer."""
        return self.mamba_d_ssm or super().state_width

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return self.embedding_multiplier

    def attends(self, index: int) -> bool:
        """Return True: every block has attention."""
        return True

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, with the key multiplier applied to the score scale."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, scale=spec.scale * self.key_multiplier)

    def mixer_sizes(self) -> StateSpaceSizes:
        """Return the sizes and multipliers of the Mamba-2 mixers."""
        return replace(
            super().mixer_sizes(),
            normed=self.mamba_rms_norm,
            norm_first=self.mamba_norm_before_gate,
            out_bias=self.projectors_bias,
            factors=self.ssm_multipliers,
        )

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP of a decoder block."""
        sizes = self.hidden_size, self.intermediate_size
        mlp = ScaledMLP(block.at("feed_forward"), *sizes, self.hidden_act, self.mlp_bias)
        mlp.factors = self.mlp_multipliers
        return mlp

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block in which attention and a Mamba-2 mixer run in parallel."""
        attention_site = site.at("self_attn")
        attention = self.self_attention(
            attention_site, index, self.attention_spec(attention_site, index, page_size)
        )
        mixer = StateSpaceMixer(site.at("mamba"), self.mixer_sizes(), self.rms_norm_eps)
        factors = (
            self.attention_in_multiplier,
            self.ssm_in_multiplier,
            self.attention_out_multiplier,
            self.ssm_out_multiplier,
        )
        parallel = ParallelMixer(attention, mixer, factors)
        return NormedBlock(site, self.norm, NORMS, parallel, self.mlp(site, index))

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        # ScaledLM divides the logits.
        divisor = 1 / self.lm_head_multiplier
        return ScaledLM(site, self, lambda at, index: self.block(at, index, page_size), divisor)


_NORMS = ("operator_norm", "", "ffn_norm", "")


class ShortConvolution(RecurrentMixer):
    """Gated short convolution: projects c * conv(b * x), where b, c and x project the input."""

    def __init__(self, site: Site, hidden_size: int, window: int, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(site.at("in_proj"), hidden_size, 3 * hidden_size, bias)
        self.conv = Convolution(site.at("conv"), hidden_size, window, bias, silu=False)
        self.out_proj = Linear(site.at("out_proj"), hidden_size, hidden_size, bias)

    def state_layout(self) -> StateLayout:
        """Return the layout of a sequence's state: the last inputs of the convolution."""
        return StateLayout((self.conv.state,))

    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Run the convolution; return the output ``[T, H]`` and the gate c, not yet applied."""
        input_gate, output_gate, x = self.in_proj(x).chunk(3, dim=-1)
        return self.conv(input_gate * x, *cache, plan), output_gate

    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate and the output projection; return ``[T, H]``."""
        return self.out_proj(gate * y)  # type: ignore[no-any-return]


class Lfm2Attention(SelfAttention):
    """Self-attention with per-head norms, with LFM2's parameter names."""

    part_names = ("out_proj", "q_layernorm", "k_layernorm")


class Lfm2MLP(GatedMLP):
    """Gated MLP with LFM2's parameter names."""

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
        """Intermediate size of the gated MLP, computed from the config's size without a gate."""
        size = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        # A gated MLP has three matrices instead of two, so 2/3 of the size keeps the weight count.
        size = int(self.block_ffn_dim_multiplier * int(2 * size / 3))
        return -(-size // self.block_multiple_of) * self.block_multiple_of

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with per-head norms of queries and keys."""
        return Lfm2Attention(site, spec, self.hidden_size, self.rotary_size, self.rms_norm_eps)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP of a decoder block."""
        return Lfm2MLP(block.at("feed_forward"), self.hidden_size, self.inner_size, "silu")

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with a gated short convolution, or with attention."""
        if self.attends(index):
            return self.normed_block(site, index, page_size, _NORMS)
        sizes = self.hidden_size, self.conv_L_cache
        mixer = ShortConvolution(site.at("conv"), *sizes, self.conv_bias)
        return NormedBlock(site, self.norm, _NORMS, mixer, self.mlp(site, index))
