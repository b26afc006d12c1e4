"""MoE layers with group-limited routing and a shared expert.

Dimensions: T tokens, H hidden size, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.mixture import MixtureFamily
from interposer_models._decoder.prediction_head import (
    HeadNames,
    NextTokenHead,
    PredictionHead,
)
from interposer_models._decoder.settings import Positive
from interposer_ops.experts import grouped_topk
from interposer_ops.layers.divided_experts import share_experts
from interposer_ops.layers.experts import Router
from interposer_ops.layers.mlp import GatedMLP

_BIAS = "gate.e_score_correction_bias"


def count_of_routed_experts(default: int | None) -> Any:
    """Return the field ``num_local_experts`` for configs that count routed experts."""
    names = AliasChoices("n_routed_experts", "num_local_experts", "num_experts")
    return Field(default=default, validation_alias=names)


@dataclass(frozen=True)
class Grouping:
    """Parameters of the op ``grouped_topk`` that chooses the experts."""

    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    scoring: str = "sigmoid"


class GroupedRouter(Router):
    """Choose experts by scores, limited to the best groups; a correction bias is optional.

    Args:
        stored_as: the name of the bias in checkpoints; empty if there is no bias.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, grouping: Grouping, stored_as: str) -> None:
        self.grouping, self.is_biased = grouping, bool(stored_as)
        super().__init__(site, spec.hidden_size, spec.num_experts, spec.top_k, grouping.renormalize)
        bias = None
        if stored_as:
            bias_values = torch.empty(spec.num_experts, dtype=self.dtype)
            bias = nn.Parameter(bias_values, requires_grad=False)
            # The checkpoint's name is not the parameter's path in this module tree.
            bias.stored_as = stored_as  # type: ignore[attr-defined]
        self.e_score_correction_bias = bias
        self.prepared_bias: Tensor | None = None

    def bind_choice(self, site: Site, sizes: Mapping[str, int]) -> None:
        """Bind the op ``grouped_topk``."""
        grouping = self.grouping
        self.grouped = site.bind_kernel(
            grouped_topk,
            **sizes,
            num_groups=grouping.num_groups,
            top_groups=grouping.top_groups,
            scoring=grouping.scoring,
            biased=self.is_biased,
            renormalize=grouping.renormalize,
        )

    def finalize(self) -> None:
        """Prepare the router's weight and the bias for the kernels."""
        super().finalize()
        bias = self.e_score_correction_bias
        flat = None if bias is None else bias.data.flatten()  # some checkpoints store [1, E]
        self.prepared_bias = self.grouped.prepared(bias=flat)["bias"]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for the logits ``[T, E]``; return weights and ids ``[T, K]``."""
        grouping = self.grouping
        group_limits = grouping.num_groups, grouping.top_groups, self.top_k
        return self.grouped.function(
            logits,
            self.prepared_bias,
            *group_limits,
            grouping.scoring,
            grouping.renormalize,
            grouping.scale,
        )


class GroupedMoE(nn.Module):
    """An MoE layer with a ``GroupedRouter`` and, optionally, a shared expert for all tokens.

    Args:
        shared_size: intermediate size of the shared expert; 0 without one.
        bias_name: name of the score correction bias in checkpoints, below this layer; empty without
            one.
    """

    def __init__(
        self, site: Site, spec: ExpertsSpec, grouping: Grouping, shared_size: int, bias_name: str
    ) -> None:
        super().__init__()
        bias = bias_name and f"{site.prefix}.{bias_name}"
        self.router = GroupedRouter(site.at("gate"), spec, grouping, bias)
        self.experts = share_experts(site.at("experts"), spec)
        self.shared = None
        if shared_size:
            sizes = spec.hidden_size, shared_size
            self.shared = GatedMLP(site.at("shared_experts"), *sizes, spec.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts plus the shared expert, ``[T, H]``."""
        routed: Tensor = self.experts(x, *self.router(x))
        return routed if self.shared is None else routed + self.shared(x)


class GroupedFamily(MixtureFamily):
    """Settings of a decoder with dense first layers and group-limited MoE layers after them.

    ``is_balanced`` says that a score correction bias per expert joins the choice. The MTP layers
    that checkpoints may have after the last layer are not part of the decoder.
    """

    is_balanced: ClassVar[bool] = True

    num_local_experts: Positive | None = count_of_routed_experts(None)
    moe_intermediate_size: Positive
    n_shared_experts: Annotated[int, Field(ge=0, lt=2**16)] = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 0
    n_group: Positive = 1
    topk_group: Positive = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert; dense layers have ``intermediate_size``."""
        return self.moe_intermediate_size

    @property
    def grouping(self) -> Grouping:
        """Return the routing parameters of all MoE layers."""
        groups = self.n_group, self.topk_group
        return Grouping(*groups, self.norm_topk_prob, self.routed_scaling_factor)

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` is an MoE layer; the first layers are dense."""
        return index >= self.first_k_dense_replace

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        # Several shared experts are stored as one MLP with their sizes added up.
        shared = self.n_shared_experts * self.moe_intermediate_size
        bias = _BIAS if self.is_balanced else ""
        return GroupedMoE(block.at("mlp"), experts, self.grouping, shared, bias)

    def prediction_head(self, site: Site, model: CausalLM, page_size: int) -> PredictionHead | None:
        """Build the checkpoint's first MTP layer, with a block like the decoder's last one."""
        if not self.num_nextn_predict_layers:
            return None
        # The MTP layer is stored as one more decoder layer.
        names = HeadNames(
            f"model.layers.{self.num_hidden_layers}",
            "enorm",
            "hnorm",
            "eh_proj",
            "",
            "shared_head.norm",
            # Checkpoints repeat the model's embedding and LM head here, arXiv:2412.19437.
            unread=("embed_tokens.", "shared_head.head."),
        )
        last = self.num_hidden_layers - 1
        return NextTokenHead(
            site, names, model, self.norm, lambda at: self.block(at, last, page_size), last
        )

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder; the checkpoint's MTP layers are not read."""
        model = super().build(site, page_size)
        mtp_layers = range(self.num_nextn_predict_layers)
        model.unread = tuple(f"model.layers.{self.num_hidden_layers + i}." for i in mtp_layers)
        return model

    @model_validator(mode="after")
    def _sound_groups(self) -> Self:
        num_experts, grouping = self.num_local_experts or 0, self.grouping
        num_groups, top_groups = grouping.num_groups, grouping.top_groups
        # With a bias, a group's score is the sum of its two best experts.
        min_group_size = 2 if self.is_balanced else 1
        if num_experts % num_groups or num_experts < min_group_size * num_groups:
            size = "at least two" if self.is_balanced else "one size"
            raise ValueError(f"{num_experts} experts are not {num_groups} groups of {size}")
        if top_groups > num_groups:
            raise ValueError(f"topk_group {top_groups} exceeds n_group {num_groups}")
        if (self.num_experts_per_tok or 0) > top_groups * (num_experts // num_groups):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the experts of "
                f"{top_groups} groups of {num_experts // num_groups}"
            )
        return self
