"""GLM-4.5: bias-balanced experts and a shared expert in all layers but the first.

Source: arXiv:2508.06471.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from interposer import AttentionSpec, Site
from interposer_models._decoder.grouped_mixture import GroupedFamily, count_of_routed_experts
from interposer_models._decoder.settings import Epsilon, Positive
from interposer_ops.layers.self_attention import SelfAttention


class Glm4Moe(GroupedFamily):
    """GLM-4.5 and GLM-4.6; half of each head is rotated."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    use_qk_norm: bool = False
    num_local_experts: Positive | None = count_of_routed_experts(128)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 1408
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention without an output bias, with per-head norms in the larger models."""
        eps = self.rms_norm_eps if self.use_qk_norm else None
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return SelfAttention(site, spec, *sizes, eps, bias)
