"""Nemotron-H: Mamba-2 mixers, MLPs or MoE layers, and some attention, one sublayer per block.

Source: arXiv:2504.03624; transformers' ``nemotron_h`` (experts).

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.blocks import OnePartBlock
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.grouped_mixture import Grouping
from interposer_models._decoder.mixture import LARGEST_TENSOR, MOST_EXPERTS
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive
from interposer_models._decoder.state_settings import Window, check_convolution, check_state
from interposer_models._decoder.state_space import StateSpaceMixer, StateSpaceSizes
from interposer_models._decoder.ungated_experts import UngatedMoE

# The letters of hybrid_override_pattern.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# The names that newer configs use.
_NEW_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


class UncachedSublayer(nn.Module):
    """An MLP or MoE layer with the call signature of attention."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self, x: Tensor, cos: object, sin: object, cache: object, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Compute ``[T, H]`` from ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens in ``rows``."""
        return self.mlp(x if rows is None else x[rows])  # type: ignore[no-any-return]


class NemotronH(DecoderFamily):
    """Nemotron-H; the decoder does not run the MTP layers."""

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
        """Validate config.json, after merging the three spellings of the layer kinds."""
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
        """Build a block of one norm and one mixer, attention, MLP or MoE layer."""
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
        """Build the MoE layer at a site."""
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
        """Build the decoder; the checkpoint's MTP layers are not read."""
        model = super().build(site, page_size)
        model.unread = ("mtp.",)
        return model

    @model_validator(mode="after")
    def _sound_experts(self) -> Self:
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
                f"{num_experts} experts of {expert_sizes} are more than a model can have"
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
    def _sound_layers(self) -> Self:
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
