"""The architectures with latent attention, those of DeepSeek and Kimi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import Architecture
from interposer_gguf._experts_settings import (
    BALANCED,
    SIGMOID,
    SOFTMAX,
    grouped_experts_of,
    scores_by_sigmoid,
)
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._settings import Settings


def _deepseek(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of DeepSeek-V3, or of V2, whose experts are chosen by a softmax.

    Older files state the sizes of keys and values, newer ones those of the vectors that are cached
    in their place, and the others by keys of their own.
    """
    balanced = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    rotated = settings.integer("rope.dimension_count")
    stated = "_mla" if "attention.key_length_mla" in settings else ""
    size = settings.integer(f"attention.key_length{stated}")
    fields = {
        **grouped_experts_of(settings),
        "num_key_value_heads": settings.integer("attention.head_count"),
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": settings.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": settings.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": settings.integer(f"attention.value_length{stated}"),
    }
    if scores_by_sigmoid(settings, SIGMOID if balanced else SOFTMAX, other=SOFTMAX):
        return fields
    if fields.pop("norm_topk_prob"):
        raise UnsupportedModelError(
            settings.path, "has expert_weights_norm with the scores of DeepSeek-V2"
        )
    how = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return {**fields, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": how}


def _indexed(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of DeepSeek-V3.2: those of V3, and of the indexer."""
    return {
        **_deepseek(settings, file),
        "index_n_heads": settings.integer("attention.indexer.head_count"),
        "index_head_dim": settings.integer("attention.indexer.key_length"),
        "index_topk": settings.integer("attention.indexer.top_k"),
    }


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return rows of keys and of values by head, of ``[N, R, K]`` and ``[N, V, R]``."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_DEEPSEEK = {
    **BALANCED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
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
        "DeepseekV3ForCausalLM", _DEEPSEEK, fields=_deepseek, mixture=True, joined=_JOINED
    ),
    "deepseek32": Architecture(
        "DeepseekV32ForCausalLM", _INDEXED, fields=_indexed, mixture=True, joined=_JOINED
    ),
}
"""By the values of ``general.architecture``."""
