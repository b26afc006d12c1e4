"""Bamba: Mamba-2 mixers and MLPs, with attention in a few layers.

Source: huggingface.co/blog/bamba; arXiv:2405.21060 for the state space model.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator
from torch import nn

from interposer import Site
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, FrameNames, Positive, Share
from interposer_models._decoder.state_settings import Steps, Window, check_convolution, check_state
from interposer_models._decoder.state_space import StateSpaceMixer, StateSpaceSizes
from interposer_ops.layers.mlp import GatedMLP

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
        """Elements of all heads of a Mamba-2 mixer."""
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
        """Build the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        return GatedMLP(block.at("feed_forward"), *sizes, self.hidden_act, self.mlp_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with a Mamba-2 mixer or attention."""
        if self.attends(index):
            return self.normed_block(site, index, page_size, NORMS)
        mixer = StateSpaceMixer(site.at("mamba"), self.mixer_sizes(), self.rms_norm_eps)
        return NormedBlock(site, self.norm, NORMS, mixer, self.mlp(site, index))

    @model_validator(mode="after")
    def _sound_state(self) -> Self:
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
