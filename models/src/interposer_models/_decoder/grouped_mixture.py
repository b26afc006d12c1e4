"""Experts that are chosen by groups, and a further one that every token visits.

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
    """Return the field ``num_local_experts`` of families that have shared experts besides."""
    names = AliasChoices("n_routed_experts", "num_local_experts", "num_experts")
    return Field(default=default, validation_alias=names)


@dataclass(frozen=True)
class Grouping:
    """The choice that a ``GroupedRouter`` makes, see the op ``grouped_topk``."""

    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    scoring: str = "sigmoid"


class GroupedRouter(Router):
    """Choose experts by scores, with a bias or without, groups of them first.

    Args:
        stored_as: the name of the bias in checkpoints; empty where there is none.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, grouping: Grouping, stored_as: str) -> None:
        self.grouping, self.is_biased = grouping, bool(stored_as)
        super().__init__(site, spec.hidden_size, spec.num_experts, spec.top_k, grouping.renormalize)
        bias = None
        if stored_as:
            offsets = torch.empty(spec.num_experts, dtype=self.dtype)
            bias = nn.Parameter(offsets, requires_grad=False)
            bias.stored_as = stored_as  # type: ignore[attr-defined]
        self.e_score_correction_bias = bias
        self.balance: Tensor | None = None

    def bind_choice(self, site: Site, sizes: Mapping[str, int]) -> None:
        """Bind the op that chooses."""
        how = self.grouping
        self.grouped = site.bind_kernel(
            grouped_topk,
            **sizes,
            num_groups=how.num_groups,
            top_groups=how.top_groups,
            scoring=how.scoring,
            biased=self.is_biased,
            renormalize=how.renormalize,
        )

    def finalize(self) -> None:
        """Prepare the projection's weights and the bias."""
        super().finalize()
        bias = self.e_score_correction_bias
        flat = None if bias is None else bias.data.flatten()  # some are stored as one row
        self.balance = self.grouped.prepared(bias=flat)["bias"]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids of the experts for the logits ``[T, E]``."""
        how = self.grouping
        first = how.num_groups, how.top_groups, self.top_k
        return self.grouped.function(
            logits, self.balance, *first, how.scoring, how.renormalize, how.scale
        )


class BalancedMixture(nn.Module):
    """Experts whose load a bias balances, and a further one that every token visits.

    Args:
        shared_size: intermediate size of that one; 0 where there is none.
        bias_name: of the bias in checkpoints, below the mixture; empty where nothing balances.
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
        """Return ``[T, H]``."""
        mixed: Tensor = self.experts(x, *self.router(x))
        return mixed if self.shared is None else mixed + self.shared(x)


class GroupedFamily(MixtureFamily):
    """The settings of a decoder whose first layers have one MLP, and the others groups of experts.

    ``is_balanced`` says that a bias per expert takes part in the choice. Layers that predict
    further tokens, which checkpoints may have behind the others, are no part of the decoder.
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
        """Intermediate size of an expert; layers without experts have ``intermediate_size``."""
        return self.moe_intermediate_size

    @property
    def grouping(self) -> Grouping:
        """Return the choice of experts that the routers make."""
        groups = self.n_group, self.topk_group
        return Grouping(*groups, self.norm_topk_prob, self.routed_scaling_factor)

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` has experts, not one MLP as the first layers do."""
        return index >= self.first_k_dense_replace

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the experts of layer ``index``, or its MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        shared = self.n_shared_experts * self.moe_intermediate_size
        bias = _BIAS if self.is_balanced else ""
        return BalancedMixture(block.at("mlp"), experts, self.grouping, shared, bias)

    def prediction_head(self, site: Site, model: CausalLM, page_size: int) -> PredictionHead | None:
        """Return the first of the layers behind the others, which is like the last of these."""
        if not self.num_nextn_predict_layers:
            return None
        names = HeadNames(
            f"model.layers.{self.num_hidden_layers}",
            "enorm",
            "hnorm",
            "eh_proj",
            "",
            "shared_head.norm",
            # They are the model's, arXiv:2412.19437.
            unread=("embed_tokens.", "shared_head.head."),
        )
        last = self.num_hidden_layers - 1
        return NextTokenHead(
            site, names, model, self.norm, lambda at: self.block(at, last, page_size), last
        )

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Return the decoder, which has no place for layers behind its own."""
        model = super().build(site, page_size)
        further = range(self.num_nextn_predict_layers)
        model.unread = tuple(f"model.layers.{self.num_hidden_layers + i}." for i in further)
        return model

    @model_validator(mode="after")
    def _sound_groups(self) -> Self:
        experts, how = self.num_local_experts or 0, self.grouping
        groups, chosen, least = how.num_groups, how.top_groups, 2 if self.is_balanced else 1
        if experts % groups or experts < least * groups:
            size = "at least two" if self.is_balanced else "one size"
            raise ValueError(f"{experts} experts are not {groups} groups of {size}")
        if chosen > groups:
            raise ValueError(f"topk_group {chosen} exceeds n_group {groups}")
        if (self.num_experts_per_tok or 0) > chosen * (experts // groups):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the experts of "
                f"{chosen} groups of {experts // groups}"
            )
        return self
