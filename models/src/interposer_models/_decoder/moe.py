"""MoE layers of decoders: routers, gated and ungated experts, and shared experts.

``MixtureFamily`` and ``SparseFamily`` route each token to the best of all experts.
``GroupedFamily`` limits the choice to the best groups of experts, and may add a shared expert for
all tokens. ``UngatedMoE`` has experts of two matrices instead of three.

Dimensions: T tokens, M rows, H hidden size, L size of the experts' input, I intermediate size, E
experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import BoundKernel, ExpertsSpec, PluggableLayer, Site
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.layers import PlainMLP
from interposer_models._decoder.mtp_head import HeadNames, NextTokenHead, PredictionHead
from interposer_models._decoder.settings import Positive
from interposer_ops.activations import relu2
from interposer_ops.experts import grouped_topk
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.moe.dispatcher import LocalDispatcher
from interposer_ops.layers.moe.parts import MoEParts
from interposer_ops.layers.moe.router import Router, Routing
from interposer_ops.layers.moe.sequential_experts import ExpertLoop, note_sequential
from interposer_ops.layers.moe.sharded_experts import shard_experts
from interposer_ops.linear import grouped_linear

LARGEST_TENSOR = 2**48
# A sanity limit: names of all experts' tensors are computed before the checkpoint is read.
MOST_EXPERTS = 2**14


def count_of_experts(default: int | None) -> Any:
    """Return a pydantic field ``num_local_experts`` that older config names can set too."""
    names = AliasChoices("num_local_experts", "num_experts")
    return Field(default=default, validation_alias=names)


class MixtureMLP(nn.Module):
    """An MoE layer that consists of a router and experts.

    Args:
        router: the router's name in checkpoints.
        renormalize: scale the weights of the chosen experts to a sum of 1.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, router: str, renormalize: bool) -> None:
        super().__init__()
        sizes = spec.hidden_size, spec.num_experts, spec.top_k
        self.router = Router(site.at(router), *sizes, renormalize, spec.biased)
        self.experts = shard_experts(site.at("experts"), spec)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, ``[T, H]``."""
        weights, expert_ids = self.router(x)
        return self.experts(x, weights, expert_ids)  # type: ignore[no-any-return]

    def moe_parts(self) -> MoEParts | None:
        """Return the parts for a fused call; None for a subclass, which may compute otherwise."""
        return MoEParts(self.router, self.experts) if type(self) is MixtureMLP else None


class MixtureFamily(DecoderFamily):
    """Base of families whose decoder has MoE layers."""

    num_local_experts: Positive | None = count_of_experts(None)
    num_experts_per_tok: Positive | None = None

    @property
    def expert_size(self) -> int:
        """Intermediate size of each expert."""
        return self.intermediate_size

    def experts(self, activation: str = "silu", **form: Any) -> ExpertsSpec:
        """Return the ``ExpertsSpec`` of a layer; ``form`` holds additional fields."""
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
    def _check_mixture(self) -> Self:
        num_experts, top_k = self.num_local_experts, self.num_experts_per_tok
        if num_experts is None or top_k is None:
            raise ValueError("num_local_experts and num_experts_per_tok must be numbers")
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok {top_k} exceeds num_local_experts {num_experts}")
        if num_experts > MOST_EXPERTS:
            raise ValueError(f"num_local_experts is {num_experts}, must be at most {MOST_EXPERTS}")
        if num_experts * self.hidden_size * self.expert_size > LARGEST_TENSOR:
            sizes = f"{self.hidden_size} x {self.expert_size}"
            raise ValueError(
                f"{num_experts} experts of {sizes} exceed the limit of {LARGEST_TENSOR} elements"
            )
        # The expert kernels of these families implement SwiGLU with SiLU only.
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {self.hidden_act!r}, experts compute with 'silu'")
        return self


class SparseFamily(MixtureFamily):
    """Base of families with many small experts, in all layers or some."""

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
        """Build an MoE layer whose experts checkpoints store one by one."""
        return MixtureMLP(site, experts, "gate", self.norm_topk_prob)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        return self.mixture(block.at("mlp"), experts)


_BIAS = "gate.e_score_correction_bias"


def count_of_routed_experts(default: int | None) -> Any:
    """Return a pydantic field ``num_local_experts``, which ``n_routed_experts`` can also set."""
    names = AliasChoices("n_routed_experts", "num_local_experts", "num_experts")
    return Field(default=default, validation_alias=names)


@dataclass(frozen=True)
class Grouping:
    """Parameters of the op ``grouped_topk``, which chooses experts within the best groups."""

    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    scoring: str = "sigmoid"


class GroupedRouter(Router):
    """Router that chooses experts by score within the best groups, with an optional bias.

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

    def bind_choice(self, site: Site, sizes: Mapping[str, int]) -> None:
        """Bind the kernel of the op ``grouped_topk`` for this router."""
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

    def routing(self) -> Routing | None:
        """Return how experts are chosen; None for a subclass, which may choose otherwise."""
        if type(self) is not GroupedRouter:
            return None
        grouping = self.grouping
        return Routing(
            self.grouped.function,
            self.top_k,
            grouping.renormalize,
            grouping.num_groups,
            grouping.top_groups,
            grouping.scoring,
            grouping.scale,
        )

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
        self.experts = shard_experts(site.at("experts"), spec)
        self.shared = None
        if shared_size:
            sizes = spec.hidden_size, shared_size
            self.shared = GatedMLP(site.at("shared_experts"), *sizes, spec.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts plus the shared expert, ``[T, H]``."""
        routed: Tensor = self.experts(x, *self.router(x))
        return routed if self.shared is None else routed + self.shared(x)

    def moe_parts(self) -> MoEParts | None:
        """Return the parts for a fused call; None for a subclass, which may compute otherwise."""
        if type(self) is not GroupedMoE:
            return None
        return MoEParts(self.router, self.experts, self.shared)


class GroupedFamily(MixtureFamily):
    """Base of families with dense first layers and group-limited MoE layers after them.

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
        """Return the routing parameters of the family's MoE layers."""
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
        """Build the checkpoint's first MTP head, with a block like the decoder's last block."""
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
        """Build the decoder without the MTP layers of the checkpoint."""
        model = super().build(site, page_size)
        mtp_layers = range(self.num_nextn_predict_layers)
        model.unread = tuple(f"model.layers.{self.num_hidden_layers + i}." for i in mtp_layers)
        return model

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
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


_UP, _DOWN = "up_proj", "down_proj"


class UngatedExperts(PluggableLayer):
    """Experts without a gate: two matrices with squared ReLU in between.

    Unquantized experts are grouped matmuls. Experts that the checkpoint's scheme quantizes are
    linear layers, computed one expert after the other.
    """

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.loop: ExpertLoop | None = None
        self.activate = site.bind(relu2, intermediate_size=spec.intermediate_size)
        self.operands: tuple[Tensor, ...] = ()
        self.bound: dict[str, BoundKernel[..., Tensor]] = {}
        # Grouped matmuls have no kernels for quantized experts without a gate.
        if _is_quantized(site, spec):
            self._add_layers(site, spec)
            return
        self.dispatcher = LocalDispatcher(site, spec)
        num_experts, sizes = spec.num_experts, (spec.hidden_size, spec.intermediate_size)
        for name, inputs, outputs in ((_UP, *sizes), (_DOWN, *sizes[::-1])):
            dims = {"in_features": inputs, "out_features": outputs}
            self.bound[name] = site.bind_kernel(grouped_linear, **dims, num_experts=num_experts)
            matrices = torch.empty(num_experts, outputs, inputs, dtype=site.dtype)
            parameter = nn.Parameter(matrices, requires_grad=False)
            # The loader stacks the experts' separate tensors into this parameter.
            parameter.expert_parts = {name: outputs}  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def _add_layers(self, site: Site, spec: ExpertsSpec) -> None:
        """Add two linear layers for each expert, in the storage form of the quantization scheme."""
        self.loop = ExpertLoop(site, spec, self.activate)
        pairs = []
        for expert in range(spec.num_experts):
            expert_site = site.at(str(expert))
            up = Linear(expert_site.at(_UP), spec.hidden_size, spec.intermediate_size)
            down = Linear(expert_site.at(_DOWN), spec.intermediate_size, spec.hidden_size)
            note_sequential(site, up, down)
            self.add_module(str(expert), nn.ModuleList((up, down)))
            pairs.append((up, down))
        self.pairs = tuple(pairs)

    def finalize(self) -> None:
        """Prepare both matrices of the experts for the kernels."""
        weights = {name: self.get_parameter(name) for name in self.bound}
        prepared = {
            name: self.bound[name].prepared(weight=w)["weight"] for name, w in weights.items()
        }
        for name, weight in weights.items():
            # The prepared copy replaces the parameter, so that memory is not used twice.
            if prepared[name] is not weight:
                self.register_parameter(name, None)
        self.operands = tuple(prepared.values())

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for ``x`` ``[T, L]``."""
        if self.loop is not None:
            return self.loop(x, self.pairs, weights, expert_ids)
        rows, starts, receipt = self.dispatcher.prepare(x, weights, expert_ids)
        (up, down), starts = self.operands, starts.long()
        hidden = self.activate(self.bound[_UP].function(rows, up, starts))
        expert_rows = self.bound[_DOWN].function(hidden, down, starts)
        return self.dispatcher.finalize(expert_rows, receipt)


class UngatedMoE(nn.Module):
    """An MoE layer of experts without a gate, with group-limited routing and a shared expert.

    Args:
        spec: the spec of the experts, with the hidden size as input size.
        shared_size: intermediate size of the shared expert.
        latent_size: L; 0 if experts read the hidden states directly.
        bias: all projections except the experts' have a bias.
    """

    def __init__(
        self,
        site: Site,
        spec: ExpertsSpec,
        grouping: Grouping,
        shared_size: int,
        latent_size: int,
        bias: bool,
    ) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.router = GroupedRouter(site.at("gate"), spec, grouping, f"{site.prefix}.{_BIAS}")
        self.into = self.out = None
        if latent_size:
            self.into = Linear(site.at("fc1_latent_proj"), hidden, latent_size, bias)
            self.out = Linear(site.at("fc2_latent_proj"), latent_size, hidden, bias)
            spec = replace(spec, hidden_size=latent_size)
        self.experts = UngatedExperts(site.at("experts"), spec)
        sizes, names = (hidden, shared_size), (_UP, _DOWN)
        self.shared = PlainMLP(site.at("shared_experts"), sizes, names, spec.activation, bias)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x if self.into is None else self.into(x)
        routed: Tensor = self.experts(inputs, *self.router(x))
        return (routed if self.out is None else self.out(routed)) + self.shared(x)  # type: ignore[no-any-return]


def _is_quantized(site: Site, spec: ExpertsSpec) -> bool:
    """Say whether the quantization scheme quantizes any matrix of the experts."""
    scheme = site.resolver.scheme
    if scheme is None or scheme.experts_method(site.prefix) is None:
        return False
    return any(
        scheme.linear_method(f"{site.prefix}.{expert}.{name}", (name,)) is not None
        for expert in range(spec.num_experts)
        for name in (_UP, _DOWN)
    )
