"""Qwen3.5 and Qwen3-Next: Gated DeltaNet mixers, with gated attention in every fourth layer.

Qwen3.5 is dense, or has many small experts and a gated shared expert.
Qwen3-Next has the same layers, with projections interleaved by key head.

Source: huggingface.co/Qwen/Qwen3.5-27B, huggingface.co/Qwen/Qwen3.5-397B-A17B,
huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, arXiv:2412.06464 (Gated DeltaNet).

Dimensions: T tokens, H hidden size, N heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar, Literal, Self

from pydantic import PrivateAttr, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, PluggableLayer, Site
from interposer_models._decoder.decoder import CausalLM, NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureFamily, SparseFamily, count_of_experts
from interposer_models._decoder.mtp_head import HeadNames, NextTokenHead, PredictionHead
from interposer_models._decoder.recurrent import (
    DeltaMixer,
    DeltaSizes,
    GroupedProjections,
    Projections,
    SeparateProjections,
)
from interposer_models._decoder.settings import (
    Positive,
    Share,
    Window,
    check_convolution,
    check_state,
)
from interposer_models._families.qwen import GatedSharedExpertMoE
from interposer_ops.layers.norm import GemmaRMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.projection_pairs import (
    QKV,
    ProjectionNames,
    shard_attention,
)

LayerKinds = tuple[Literal["full_attention", "linear_attention"], ...]
_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")


class GatedAttention(SelfAttention):
    """Self-attention with a sigmoid gate on the output, computed by the query projection."""

    norm_type = GemmaRMSNorm

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        hidden_size: int,
        rotary_size: int,
        norm_eps: float,
        bias: bool,
    ) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        names = ProjectionNames("qkv_proj", "o_proj", bias, bias)
        # The query projection also computes the gate: two values per query element, head by head.
        outputs = {**QKV, "q_proj": (("query", 2),)}
        shards = shard_attention(site, spec, hidden_size, names, outputs)
        self.sizes = shards.sizes
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = self.norm_type(site.at("q_norm"), size, norm_eps)
        self.k_norm = self.norm_type(site.at("k_norm"), size, norm_eps)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = shards.attention(site.at("attn"))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Compute gated attention and the output projection, as ``SelfAttention`` does."""
        queries_and_gates, key, value = self.qkv_proj(x).split(self.sizes, dim=-1)
        query, gate = queries_and_gates.unflatten(-1, (-1, 2 * self.head_size)).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (-1, self.head_size)) for part in (key, value))
        assert self.q_norm is not None
        assert self.k_norm is not None
        query, key = self.rotary(self.q_norm(query), self.k_norm(key), cos, sin)
        attended = self.attn(query, key, value, cache, plan)
        if rows is not None:
            attended, gate = attended[rows], gate[rows]
        return self.o_proj((attended * gate.sigmoid()).flatten(1))  # type: ignore[no-any-return]


class Qwen3_5(DecoderFamily):
    """Settings of the text decoder of Qwen3.5's dense models, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    reads_layer_types: ClassVar[bool] = True
    projections: ClassVar[Projections] = SeparateProjections

    head_dim: Positive | None = 256
    partial_rotary_factor: Share = 0.25
    layer_types: LayerKinds | None = None  # type: ignore[assignment]
    full_attention_interval: Positive = 4
    linear_conv_kernel_dim: Window = 4
    linear_key_head_dim: Positive = 128
    linear_value_head_dim: Positive = 128
    linear_num_key_heads: Positive = 16
    linear_num_value_heads: Positive = 32

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention, not a DeltaNet mixer."""
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return (index + 1) % self.full_attention_interval == 0

    def norm(self, site: Site) -> GemmaRMSNorm:
        """Build an RMSNorm for the module path ``site``."""
        return GemmaRMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with an output gate."""
        sizes = self.hidden_size, self.rotary_size
        return GatedAttention(site, spec, *sizes, self.rms_norm_eps, self.attention_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with a Gated DeltaNet mixer, or with attention."""
        if self.attends(index):
            return self.normed_block(site, index, page_size, _NORMS)
        sizes = DeltaSizes(
            self.hidden_size,
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )
        mixer_site, projections = site.at("linear_attn"), type(self).projections
        mixer = DeltaMixer(mixer_site, sizes, self.rms_norm_eps, projections)
        return NormedBlock(site, self.norm, _NORMS, mixer, self.mlp(site, index))

    def prediction_head(self, site: Site, model: CausalLM, page_size: int) -> PredictionHead | None:
        """Build the MTP head, with a block like the decoder's last attention block."""
        names = HeadNames(
            "mtp",
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            "fc",
            "layers.0",
            "norm",
        )
        last = max(filter(self.attends, range(self.num_hidden_layers)), default=None)
        if last is None:
            return None
        return NextTokenHead(
            site, names, model, self.norm, lambda at: self.block(at, last, page_size), last
        )

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder without the MTP head of the checkpoint."""
        model = super().build(site, page_size)
        model.unread = ("mtp.",)
        return model

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        heads, groups = self.linear_num_value_heads, self.linear_num_key_heads
        if heads % groups:
            raise ValueError(
                f"linear_num_value_heads {heads} is not a multiple of linear_num_key_heads {groups}"
            )
        check_state(heads, self.linear_key_head_dim, self.linear_value_head_dim)
        check_convolution("hidden_act", self.hidden_act)
        return self


class Qwen3_5Moe(MixtureFamily, Qwen3_5):
    """Settings of Qwen3.5's MoE models.

    Published checkpoints stack the matrices of all experts; quantized ones, and those that
    transformers writes, store every expert separately.
    """

    head_dim: Positive | None = 256
    partial_rotary_factor: Share = 0.25
    layer_types: LayerKinds | None = None
    intermediate_size: Positive = 1  # no layer has a dense MLP
    num_local_experts: Positive | None = count_of_experts(256)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 512
    shared_expert_intermediate_size: Positive = 512
    _stacks_experts: bool = PrivateAttr(default=False)

    def for_tensors(self, names: Callable[[], Collection[str]]) -> Self:
        """Return the settings for experts that are stored as the names of tensors say."""
        settings = self.model_copy()
        settings._stacks_experts = any(name.endswith(".experts.gate_up_proj") for name in names())
        return settings

    @property
    def expert_size(self) -> int:
        """Intermediate size of each expert."""
        return self.moe_intermediate_size

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``."""
        names = None if self._stacks_experts else ("gate_proj", "up_proj", "down_proj")
        experts = self.experts(projections=names)
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(block.at("mlp"), experts, shared, renormalize=True)


class Qwen3Next(SparseFamily, Qwen3_5):
    """Settings of Qwen3-Next, which also build the decoder."""

    projections: ClassVar[Projections] = GroupedProjections

    head_dim: Positive | None = 256
    partial_rotary_factor: Share = 0.25
    layer_types: LayerKinds | None = None
    num_local_experts: Positive | None = count_of_experts(512)
    num_experts_per_tok: Positive | None = 10
    moe_intermediate_size: Positive = 512
    shared_expert_intermediate_size: Positive = 512
    norm_topk_prob: bool = True

    def mixture(self, site: Site, experts: ExpertsSpec) -> nn.Module:
        """Build the MoE layer with a gated shared expert."""
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(site, experts, shared, self.norm_topk_prob)
