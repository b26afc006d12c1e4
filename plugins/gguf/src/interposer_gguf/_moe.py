"""MoE architectures whose checkpoints store each expert separately.

In a file, the matrices of a layer's experts are three tensors ``[E, outputs, inputs]``.

Source: tables of gguf-py (gguf/constants.py), conversions of llama.cpp, and graphs of llama.cpp for
values that the metadata lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer_gguf._architecture import FIRST_BIAS, Architecture
from interposer_gguf._experts_config import (
    BALANCED,
    EXPERTS,
    SHARED,
    SIGMOID,
    experts_of,
    grouped_experts_of,
    scores_by_sigmoid,
    small_experts_of,
)
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader


def _qwen2(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Qwen2-MoE; router weights are not renormalized."""
    return {
        **small_experts_of(metadata),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": FIRST_BIAS in file.tensors,
    }


def _qwen3(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Qwen3-MoE; router weights are renormalized."""
    return {**small_experts_of(metadata), "norm_topk_prob": True}


def _ernie(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    return {
        **small_experts_of(metadata),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Hunyuan; the shared expert has the size of the routed experts."""
    return {
        **experts_of(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _minimax(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    # Called for the error: the family supports no other function than sigmoid.
    scores_by_sigmoid(metadata, default=SIGMOID)
    size = metadata.integer("expert_feed_forward_length")
    rotated = metadata.integer("rope.dimension_count")
    return {**experts_of(metadata), "intermediate_size": size, "rotary_dim": rotated}


def _glm(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    # Called for the error: the family supports no other function than sigmoid.
    scores_by_sigmoid(metadata, default=SIGMOID)
    return {
        **grouped_experts_of(metadata),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": FIRST_BIAS in file.tensors,
    }


# In checkpoints of Mixtral, w1 is the gate, w3 the up and w2 the down projection.
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN2 = {
    **EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ERNIE = {**SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
_HUNYUAN = {
    **EXPERTS,
    "ffn_gate_inp": "mlp.gate.wg",
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_MINIMAX = {**_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _MIXTRAL,
    permuted=True,
    fields=lambda metadata, file: experts_of(metadata),
    has_experts=True,
)
"""The architecture that ``llama`` stands for in files with experts."""

MIXTURES: Mapping[str, Architecture] = {
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _QWEN2,
        fields=_qwen2,
        has_experts=True,
        row_vectors=("mlp.shared_expert_gate.weight",),
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", EXPERTS, fields=_qwen3, has_experts=True),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _ERNIE,
        fields=_ernie,
        has_experts=True,
        row_vectors=("mlp.moe_statics.e_score_correction_bias",),
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM", _HUNYUAN, fields=_hunyuan, has_experts=True
    ),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _MINIMAX, fields=_minimax, has_experts=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        {**BALANCED, "post_attention_norm": "post_attention_layernorm"},
        fields=_glm,
        has_experts=True,
    ),
}
"""By the values of ``general.architecture``."""
