"""Mamba-2: state space mixers only, without attention and without MLPs.

Source: arXiv:2405.21060.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import AliasChoices, Field, model_validator
from torch import nn

from interposer import Site
from interposer_models._decoder.blocks import OnePartBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive
from interposer_models._decoder.state_settings import Steps, Window, check_convolution, check_state
from interposer_models._decoder.state_space import StateSpaceMixer, StateSpaceSizes

# The config states no context length, and the cost of a step does not grow with the context.
_CONTEXT = 2**20


class Mamba2(DecoderFamily):
    """The Mamba-2 language models."""

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
        """Build a block of one norm and one mixer."""
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
    def _sound_state(self) -> Self:
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
