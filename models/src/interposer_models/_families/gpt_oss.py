"""gpt-oss: experts with a clamped SwiGLU, attention sinks per head, alternating windows.

Source: arXiv:2508.10925.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import AliasChoices, Field, model_validator
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.moe import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase, WindowTokens
from interposer_ops.experts import SWIGLU_ALPHA, SWIGLU_LIMIT

# The rotary scaling of the release, for configs without one.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(MixtureFamily):
    """Settings of gpt-oss, which also build the decoder; all projections have a bias."""

    reads_layer_types: ClassVar[bool] = True
    attention_bias: bool = True
    dtype: str = Field(default="bfloat16", validation_alias=AliasChoices("dtype", "torch_dtype"))
    head_dim: Positive | None = 64
    num_local_experts: Positive | None = count_of_experts(128)
    num_experts_per_tok: Positive | None = 4
    rms_norm_eps: Epsilon = 1e-5
    rope_parameters: dict[str, Any] = Field(
        default=_ROPE, validation_alias=AliasChoices("rope_parameters", "rope_scaling")
    )
    rope_theta: RopeBase = 150000.0
    sliding_window: WindowTokens | None = 128
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` has a sliding window: every second one, from the first."""
        return index % 2 == 0

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, with a learned sink score per head in every softmax."""
        return replace(super().attention_spec(site, index, page_size), sinks=True)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer, whose gate and up projections checkpoints interleave."""
        form = {"biased": True, "alternating": True, "inputs_first": True}
        experts = self.experts("swiglu_oai", **form)
        return MixtureMLP(block.at("mlp"), experts, "router", renormalize=True)

    @model_validator(mode="after")
    def _check_swiglu_constants(self) -> Self:
        for name, computed in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if getattr(self, name) != computed:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, experts compute with {computed}"
                )
        return self
