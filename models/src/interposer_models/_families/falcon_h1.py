"""Falcon-H1: attention and a state space side by side in every block, with many multipliers.

Source: arXiv:2507.22448.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.settings import Positive, Share
from interposer_models._decoder.state_space import StateSpaceMixer, StateSpaceSizes
from interposer_models._families.bamba import NORMS, Bamba
from interposer_models._families.granite import Multiplier, ScaledLM
from interposer_ops.layers.mlp import GatedMLP


class ScaledMLP(GatedMLP):
    """A gated MLP with a factor on the gate before the activation, and one on the output."""

    factors = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        inner = self.activation(torch.cat((gate * self.factors[0], up), dim=-1))
        return self.down_proj(inner) * self.factors[1]  # type: ignore[no-any-return]


class SideBySide(nn.Module):
    """The sum of what attention and a state space compute of one input.

    Args:
        factors: of the inputs of both, then of the outputs of both, attention first.
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
        """Return ``[T, H]`` of ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens they name."""
        inner, outer = self.factors[:2], self.factors[2:]
        seen = self.attention(x * inner[0], cos, sin, cache[0], plan[0], rows)
        kept = self.mixer(x * inner[1], cos, sin, cache[1], plan[1], rows)
        return seen * outer[0] + kept * outer[1]  # type: ignore[no-any-return]


class FalconH1(Bamba):
    """Falcon-H1."""

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
        """Elements of all heads of a state space."""
        return self.mamba_d_ssm or super().state_width

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return self.embedding_multiplier

    def attends(self, index: int) -> bool:
        """Say that every block has attention."""
        return True

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return what attention has to do; a factor of keys is one of scores."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, scale=spec.scale * self.key_multiplier)

    def mixer_sizes(self) -> StateSpaceSizes:
        """Return the sizes of a state space."""
        return replace(
            super().mixer_sizes(),
            normed=self.mamba_rms_norm,
            norm_first=self.mamba_norm_before_gate,
            out_bias=self.projectors_bias,
            factors=self.ssm_multipliers,
        )

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        mlp = ScaledMLP(block.at("feed_forward"), *sizes, self.hidden_act, self.mlp_bias)
        mlp.factors = self.mlp_multipliers
        return mlp

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return a block with both."""
        at = site.at("self_attn")
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        mixer = StateSpaceMixer(site.at("mamba"), self.mixer_sizes(), self.rms_norm_eps)
        factors = (
            self.attention_in_multiplier,
            self.ssm_in_multiplier,
            self.attention_out_multiplier,
            self.ssm_out_multiplier,
        )
        both = SideBySide(attention, mixer, factors)
        return NormedBlock(site, self.norm, NORMS, both, self.mlp(site, index))

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Return the decoder with its LM head."""
        divisor = 1 / self.lm_head_multiplier
        return ScaledLM(site, self, lambda at, index: self.block(at, index, page_size), divisor)
