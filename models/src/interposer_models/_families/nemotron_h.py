"""Nemotron-H: state spaces, MLPs and a few layers of attention, each behind a norm of its own.

Source: arXiv:2504.03624.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.blocks import OnePartBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.plain_mlp import PlainMLP
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive
from interposer_models._decoder.state_settings import Window, check_state
from interposer_models._decoder.state_space import StateSpaceMixer, StateSpaceSizes

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEWER = {"linear_attention": "mamba", "full_attention": "attention"}


class Alone(nn.Module):
    """An MLP that is called as attention is."""

    def __init__(self, mlp: PlainMLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self, x: Tensor, cos: object, sin: object, cache: object, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens they name."""
        return self.mlp(x if rows is None else x[rows])  # type: ignore[no-any-return]


class NemotronH(DecoderFamily):
    """Nemotron-H without experts."""

    frame: ClassVar[FrameNames] = FrameNames("backbone", "embeddings", "norm_f")
    attention_name = "mixer"

    head_dim: Positive | None = 128
    rms_norm_eps: Epsilon = Field(
        default=1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "rms_norm_eps")
    )
    hidden_act: str = Field(
        default="relu2", validation_alias=AliasChoices("mlp_hidden_act", "hidden_act")
    )
    layers_block_type: tuple[Literal["mamba", "attention", "mlp"], ...]
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

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Return the settings of config.json; experts are refused."""
        stated = config.get("layers_block_type") or config.get("layer_types")
        pattern = config.get("hybrid_override_pattern")
        if not stated and isinstance(pattern, str):
            stated = [_KINDS.get(sign, sign) for sign in pattern]
        if not isinstance(stated, list):
            return super().parse({**config, "layer_types": None}, source)
        kinds = [_NEWER.get(kind, kind) if isinstance(kind, str) else kind for kind in stated]
        if "moe" in kinds:
            raise UnsupportedModelError(
                source,
                "some layers are experts without a gate, which are not computed",
                "a checkpoint of the model without experts",
            )
        count = {"num_hidden_layers": len(kinds)}
        known = {**count, **config, "layer_types": None, "layers_block_type": kinds}
        return super().parse(known, source)

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention."""
        return self.layers_block_type[index] == "attention"

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return the one part of a block behind its norm."""
        part: nn.Module
        at, kind = site.at("mixer"), self.layers_block_type[index]
        if kind == "attention":
            spec = self.attention_spec(at, index, page_size)
            part = UnrotatedAttention(at, spec, self.hidden_size, self.rotary_size)
        elif kind == "mlp":
            sides = self.hidden_size, self.intermediate_size
            mlp = PlainMLP(at, sides, ("up_proj", "down_proj"), self.hidden_act, self.mlp_bias)
            part = Alone(mlp)
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
        return self
