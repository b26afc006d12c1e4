"""DeepSeek-V2, V3 and V3.2: latent attention (MLA), and group-limited expert choice.

V2 scores experts by a softmax. V3 (and Kimi K2, with more experts in one group) uses a sigmoid and
a score correction bias that balances the experts. V3.2 adds sparse attention to the tokens that an
indexer selects.

Source: arXiv:2405.04434 (V2), arXiv:2412.19437 (V3), DeepSeek-V3.2-Exp technical report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from interposer import AttentionSpec, Site
from interposer_models._decoder.mla import LatentFamily, LatentSizes, SparseLatentAttention
from interposer_models._decoder.moe import Grouping, count_of_routed_experts
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.self_attention import SelfAttention


class DeepseekV2(LatentFamily):
    """Settings of DeepSeek-V2 (also Lite and Coder) and V2.5, which also build the decoder.

    No checkpoint sets ``norm_topk_prob``. transformers ignores the field; the program published
    with the weights would renormalize without scaling.
    """

    is_balanced: ClassVar[bool] = False

    num_local_experts: Positive | None = count_of_routed_experts(64)
    moe_intermediate_size: Positive = 1407
    n_shared_experts: Annotated[int, Field(gt=0, lt=2**16)] = 2
    n_group: Positive | None = None  # type: ignore[assignment]
    topk_group: Positive | None = None  # type: ignore[assignment]
    # Other values are refused, as transformers and the published program disagree about them.
    norm_topk_prob: Literal[False] = False
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"

    @property
    def grouping(self) -> Grouping:
        """Return the routing parameters: experts are chosen from all, or from the best groups."""
        num_groups, top_groups = 1, 1
        if self.topk_method == "group_limited_greedy":
            if self.n_group is None or self.topk_group is None:
                raise ValueError(
                    "topk_method is 'group_limited_greedy', so n_group and topk_group must be "
                    "numbers"
                )
            num_groups, top_groups = self.n_group, self.topk_group
        return Grouping(num_groups, top_groups, False, self.routed_scaling_factor, "softmax")


class DeepseekV3(LatentFamily):
    """Settings of DeepSeek-V3, R1 and Kimi K2, which build the decoder without MTP layers."""

    num_local_experts: Positive | None = count_of_routed_experts(256)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 2048
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 3
    n_group: Positive = 8
    topk_group: Positive = 4
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    # False means that the rotary elements are stored as two halves.
    rope_interleave: bool = True
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def interleaved(self) -> bool:
        """Whether rotary embedding rotates adjacent elements, not the halves of the rotary part."""
        return self.rope_interleave


_LARGEST_WIDTH = 2**24


class DeepseekV32(DeepseekV3):
    """Settings of DeepSeek-V3.2 and V3.2-Exp, which build the decoder without MTP layers."""

    reads_layer_types: ClassVar[bool] = True
    layer_types: tuple[Literal["indexed_attention"], ...] | None = None  # type: ignore[assignment]
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    q_lora_rank: Positive = 1536
    # SparseLatentAttention supports no other rotation.
    rope_interleave: Literal[True] = True
    index_topk: Annotated[int, Field(gt=0, lt=2**24)] = 2048
    index_n_heads: Positive = 64
    index_head_dim: Annotated[int, Field(gt=1, lt=2**16)] = 128

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` is an MoE layer, not a dense MLP."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[index] == "sparse"
        return super().has_experts(index)

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec of layer ``index``, with sparse attention."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, sparse=True, top_k=self.index_topk)

    def indexer_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the attention spec of an indexer, which selects tokens for an attention layer."""
        return AttentionSpec(
            num_heads=self.index_n_heads,
            num_kv_heads=1,
            head_size=self.index_head_dim,
            dtype=spec.dtype,
            cache_dtype=spec.dtype,
            page_size=spec.page_size,
            scale=self.index_head_dim**-0.5,
            type="indexer",
            top_k=self.index_topk,
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the self-attention of layer ``index``, with an indexer."""
        head_sizes = self.q_lora_rank, self.qk_nope_head_dim, self.v_head_dim
        sizes, indexer = LatentSizes(self.hidden_size, *head_sizes), self.indexer_spec(spec)
        return SparseLatentAttention(site, spec, sizes, indexer, self.attention_bias)

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield attention spec and module path of each block's attention, and of its indexer."""
        for spec, attention_site in super().attention(site):
            yield spec, attention_site
            # The indexer is a sibling of the attention backend's site.
            parent = attention_site.prefix.rpartition(".")[0]
            yield self.indexer_spec(spec), replace(attention_site, prefix=f"{parent}.indexer.attn")

    @model_validator(mode="after")
    def _check_indexer(self) -> Self:
        heads, size, kinds = self.index_n_heads, self.index_head_dim, self.mlp_layer_types
        if size < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim {size} is less than qk_rope_head_dim {self.qk_rope_head_dim}, "
                "the number of its rotated elements"
            )
        if heads * size > _LARGEST_WIDTH:
            raise ValueError(
                f"{heads} index heads of {size} exceed the limit of {_LARGEST_WIDTH} elements"
            )
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            raise ValueError(f"mlp_layer_types has {len(kinds)} of {self.num_hidden_layers} layers")
        return self
