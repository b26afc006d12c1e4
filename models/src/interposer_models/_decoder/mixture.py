"""The MoE layer that some decoders have instead of a dense MLP.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.divided_experts import share_experts
from interposer_ops.layers.experts import Router

LARGEST_TENSOR = 2**48
# A sanity limit: names of all experts' tensors are computed before the checkpoint is read.
MOST_EXPERTS = 2**14


def count_of_experts(default: int | None) -> Any:
    """Return the field ``num_local_experts`` with a default, and the alias of older configs."""
    names = AliasChoices("num_local_experts", "num_experts")
    return Field(default=default, validation_alias=names)


class MixtureMLP(nn.Module):
    """An MoE layer: a router and experts.

    Args:
        router: the router's name in checkpoints.
        renormalize: scale the weights of the chosen experts to a sum of 1.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, router: str, renormalize: bool) -> None:
        super().__init__()
        sizes = spec.hidden_size, spec.num_experts, spec.top_k
        self.router = Router(site.at(router), *sizes, renormalize, spec.biased)
        self.experts = share_experts(site.at("experts"), spec)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, ``[T, H]``."""
        weights, expert_ids = self.router(x)
        return self.experts(x, weights, expert_ids)  # type: ignore[no-any-return]


class MixtureFamily(DecoderFamily):
    """Settings of a decoder with MoE layers."""

    num_local_experts: Positive | None = count_of_experts(None)
    num_experts_per_tok: Positive | None = None

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert."""
        return self.intermediate_size

    def experts(self, activation: str = "silu", **form: Any) -> ExpertsSpec:
        """Describe a layer's experts; ``form`` are further fields of ``ExpertsSpec``."""
        assert self.num_local_experts is not None
        assert self.num_experts_per_tok is not None
        return ExpertsSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.expert_size,
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            activation=activation,
            **form,
        )

    @model_validator(mode="after")
    def _sound_mixture(self) -> Self:
        num_experts, top_k = self.num_local_experts, self.num_experts_per_tok
        if num_experts is None or top_k is None:
            raise ValueError("num_local_experts and num_experts_per_tok must be numbers")
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok {top_k} exceeds num_local_experts {num_experts}")
        if num_experts > MOST_EXPERTS:
            raise ValueError(f"num_local_experts is {num_experts}, must be at most {MOST_EXPERTS}")
        if num_experts * self.hidden_size * self.expert_size > LARGEST_TENSOR:
            sizes = f"{self.hidden_size} x {self.expert_size}"
            raise ValueError(f"{num_experts} experts of {sizes} are more than a model can have")
        # The expert kernels of these families implement SwiGLU with SiLU only.
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {self.hidden_act!r}, experts compute with 'silu'")
        return self


class SparseFamily(MixtureFamily):
    """Settings of a decoder with many small experts, in all layers or some."""

    moe_intermediate_size: Positive = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert; dense layers have ``intermediate_size``."""
        return self.moe_intermediate_size

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` is an MoE layer, not a dense MLP."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def mixture(self, site: Site, experts: ExpertsSpec) -> nn.Module:
        """Build the MoE layer at a site; checkpoints store every expert separately."""
        return MixtureMLP(site, experts, "gate", self.norm_topk_prob)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        return self.mixture(block.at("mlp"), experts)
