"""Hunyuan MoE: Hunyuan with experts and a shared expert.

Source: arXiv:2411.02265; huggingface.co/tencent/Hunyuan-A13B-Instruct.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.field_error import FieldError
from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive
from interposer_models._families.hunyuan_dense import HunYuanDenseV1
from interposer_ops.layers.mlp import GatedMLP

# Fields that Hunyuan-A13B states as a list with one number per layer.
_PER_LAYER = ("moe_topk", "num_experts")


class SharedExpertMoE(MixtureMLP):
    """An MoE layer with a shared expert."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__(site, spec, "gate.wg", renormalize=True)
        sizes = spec.hidden_size, spec.intermediate_size
        self.shared_mlp = GatedMLP(site.at("shared_mlp"), *sizes, spec.activation)

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor = self.shared_mlp(x)
        return super().forward(x) + shared


class HunYuanMoEV1(MixtureFamily, HunYuanDenseV1):
    """Hunyuan with experts, equally many per layer; checkpoints store every expert separately."""

    rms_norm_eps: Epsilon = 1e-5
    num_local_experts: Positive | None = count_of_experts(1)
    num_experts_per_tok: Positive | None = Field(
        default=1, validation_alias=AliasChoices("moe_topk", "num_experts_per_tok")
    )

    @model_validator(mode="before")
    @classmethod
    def _merge_per_layer_numbers(cls, fields: Any) -> Any:
        """Accept a list of equal numbers, one per layer, as in Hunyuan-A13B's config."""
        merged = dict(fields)
        for name in _PER_LAYER:
            if not isinstance(values := merged.get(name), list):
                continue
            if not values or any(value != values[0] for value in values):
                raise FieldError(
                    f"{name} is {values!r:.100}, must be one number for all layers",
                    "load it by transformers, and interposer_models.adapt(model)",
                )
            merged[name] = values[0]
        return merged

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer."""
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        return SharedExpertMoE(block.at("mlp"), experts)
