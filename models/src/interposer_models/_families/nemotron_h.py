"""Nemotron-H: state spaces, MLPs or experts and some attention, each behind a norm of its own.

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
from interposer_models._decoder.ungated_experts import UngatedMixture

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEWER = {"linear_attention": "mamba", "full_attention": "attention"}


class Alone(nn.Module):
    """An MLP or a mixture that is called as attention is."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self, x: Tensor, cos: object, sin: object, cache: object, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens they name."""
        return self.mlp(x if rows is None else x[rows])  # type: ignore[no-any-return]


class NemotronH(DecoderFamily):
    """Nemotron-H; layers that predict further tokens are not computed."""

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
        """Return the settings of config.json."""
        stated = config.get("layers_block_type") or config.get("layer_types")
        pattern = config.get("hybrid_override_pattern")
        if not stated and isinstance(pattern, str):
            stated = [_KINDS.get(sign, sign) for sign in pattern]
        if not isinstance(stated, list):
            return super().parse({**config, "layer_types": None}, source)
        kinds = [_NEWER.get(kind, kind) if isinstance(kind, str) else kind for kind in stated]
        count = {"num_hidden_layers": len(kinds)}
        known = {**count, **config, "layer_types": None, "layers_block_type": kinds}
        return super().parse(known, source)

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention."""
        return self.layers_block_type[index] == "attention"

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return a block of one norm and one mixer, attention or MLP."""
        part: nn.Module
        at, kind = site.at("mixer"), self.layers_block_type[index]
        if kind == "attention":
            spec = self.attention_spec(at, index, page_size)
            part = UnrotatedAttention(at, spec, self.hidden_size, self.rotary_size)
        elif kind == "mlp":
            sides = self.hidden_size, self.intermediate_size
            mlp = PlainMLP(at, sides, ("up_proj", "down_proj"), self.hidden_act, self.mlp_bias)
            part = Alone(mlp)
        elif kind == "moe":
            part = Alone(self.mixture(at))
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
            part = StateSpaceMixer(at, sizes, self.rms_norm_eps)
        return OnePartBlock(site, self.norm, "norm", part)

    def mixture(self, site: Site) -> UngatedMixture:
        """Return the experts at a site."""
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
        return UngatedMixture(site, spec, grouping, *sizes, self.mlp_bias)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Return the decoder, which has no place for layers that predict further tokens."""
        model = super().build(site, page_size)
        model.unread = ("mtp.",)
        return model

    @model_validator(mode="after")
    def _sound_experts(self) -> Self:
        if "moe" not in self.layers_block_type:
            return self
        count, groups, chosen = self.n_routed_experts, self.n_group, self.topk_group
        if self.hidden_act != "relu2":
            raise ValueError(
                f"mlp_hidden_act is {self.hidden_act!r}, experts without a gate have 'relu2'"
            )
        sides = self.moe_latent_size or self.hidden_size, self.moe_intermediate_size
        if count * sides[0] * sides[1] > LARGEST_TENSOR:
            raise ValueError(f"{count} experts of {sides} are more than a model can have")
        if count % groups or count < 2 * groups:
            raise ValueError(f"{count} experts are not {groups} groups of at least two")
        if chosen > groups:
            raise ValueError(f"topk_group {chosen} exceeds n_group {groups}")
        if self.num_experts_per_tok > chosen * (count // groups):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the experts of "
                f"{chosen} groups of {count // groups}"
            )
        return self

    @model_validator(mode="after")
    def _sound_layers(self) -> Self:
        count = len(self.layers_block_type)
        if count != self.num_hidden_layers:
            raise ValueError(f"layers_block_type has {count} of {self.num_hidden_layers} layers")
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(
                f"mamba_num_heads {self.mamba_num_heads} is not a multiple of n_groups "
                f"{self.n_groups}"
            )
        check_state(self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size)
        check_convolution("mamba_hidden_act", self.mamba_hidden_act)
        return self
