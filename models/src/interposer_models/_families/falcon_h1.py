"""Falcon-H1: attention and a Mamba-2 mixer in parallel in every block, with many multipliers.

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
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        inner = self.activation(torch.cat((gate * self.factors[0], up), dim=-1))
        return self.down_proj(inner) * self.factors[1]  # type: ignore[no-any-return]


class ParallelMixer(nn.Module):
    """The scaled sum of attention and a Mamba-2 mixer on the same input.

    Args:
        factors: of the inputs of attention and mixer, then of the outputs of attention and mixer.
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
        """Elements of all heads of a Mamba-2 mixer."""
        return self.mamba_d_ssm or super().state_width

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return self.embedding_multiplier

    def attends(self, index: int) -> bool:
        """Return True: every block has attention."""
        return True

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the attention; the key multiplier is applied to the score scale."""
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
        """Build the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        mlp = ScaledMLP(block.at("feed_forward"), *sizes, self.hidden_act, self.mlp_bias)
        mlp.factors = self.mlp_multipliers
        return mlp

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with parallel attention and Mamba-2 mixer."""
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
