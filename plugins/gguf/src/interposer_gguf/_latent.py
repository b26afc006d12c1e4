"""The architectures with multi-head latent attention (MLA): DeepSeek and Kimi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import Architecture
from interposer_gguf._experts_config import (
    BALANCED,
    SIGMOID,
    SOFTMAX,
    grouped_experts_of,
    scores_by_sigmoid,
)
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader


def _deepseek(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of DeepSeek-V3, or of V2 if the router uses softmax.

    Older files store the key and value sizes of MLA under ``key_length`` and ``value_length``.
    Newer files store the sizes of the cached vectors there, and the sizes of MLA under keys that
    end with ``_mla``.
    """
    has_score_bias = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    rotated = metadata.integer("rope.dimension_count")
    key_suffix = "_mla" if "attention.key_length_mla" in metadata else ""
    size = metadata.integer(f"attention.key_length{key_suffix}")
    fields = {
        **grouped_experts_of(metadata),
        # MLA makes keys and values for every head.
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.integer(f"attention.value_length{key_suffix}"),
    }
    if scores_by_sigmoid(metadata, SIGMOID if has_score_bias else SOFTMAX, alternative=SOFTMAX):
        return fields
    if fields.pop("norm_topk_prob"):
        raise UnsupportedModelError(
            metadata.path, "has expert_weights_norm with the scores of DeepSeek-V2"
        )
    topk_method = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return {**fields, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": topk_method}


def _deepseek32(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of DeepSeek-V3.2: V3, and the sparse-attention indexer."""
    return {
        **_deepseek(metadata, file),
        "index_n_heads": metadata.integer("attention.indexer.head_count"),
        "index_head_dim": metadata.integer("attention.indexer.key_length"),
        "index_topk": metadata.integer("attention.indexer.top_k"),
    }


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Join keys ``[N, R, K]`` and values ``[N, V, R]`` to the rows of ``kv_b_proj``, by head."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_DEEPSEEK = {
    **BALANCED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # A file stores kv_b_proj as one tensor, or as two tensors that ``_JOINED`` joins.
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
_INDEXED = {
    **_DEEPSEEK,
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
_JOINED = {"attn_k_b.weight": ("attn_v_b.weight", _keys_and_values)}

LATENT: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM", _DEEPSEEK, fields=_deepseek, has_experts=True, joins=_JOINED
    ),
    "deepseek32": Architecture(
        "DeepseekV32ForCausalLM", _INDEXED, fields=_deepseek32, has_experts=True, joins=_JOINED
    ),
}
"""By the values of ``general.architecture``."""
