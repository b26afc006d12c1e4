"""The architectures whose checkpoints store every expert by itself.

In a file, the matrices of a layer's experts are three tensors ``[E, outputs, inputs]``.

Source: the tables of gguf-py (gguf/constants.py), the conversions of llama.cpp and its graphs,
which say what the metadata leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer_gguf._architecture import FIRST_BIAS, Architecture
from interposer_gguf._experts_settings import (
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
from interposer_gguf._settings import Settings


def _qwen2(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Qwen2's fields; none of its weights are renormalized, as llama.cpp computes them."""
    return {
        **small_experts_of(settings),
        "shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": FIRST_BIAS in file.tensors,
    }


def _qwen3(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Qwen3's fields; all its weights are renormalized, as llama.cpp computes them."""
    return {**small_experts_of(settings), "norm_topk_prob": True}


def _ernie(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {
        **small_experts_of(settings),
        "moe_num_shared_experts": settings.integer("expert_shared_count", 0),
        "moe_layer_start_index": settings.integer("leading_dense_block_count", 0),
        "moe_layer_interval": settings.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Hunyuan's fields; the expert that every token visits has the size of the others."""
    return {
        **experts_of(settings),
        "intermediate_size": settings.integer("expert_feed_forward_length"),
    }


def _minimax(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    scores_by_sigmoid(settings, default=SIGMOID)
    size = settings.integer("expert_feed_forward_length")
    rotated = settings.integer("rope.dimension_count")
    return {**experts_of(settings), "intermediate_size": size, "rotary_dim": rotated}


def _glm(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    scores_by_sigmoid(settings, default=SIGMOID)
    return {
        **grouped_experts_of(settings),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": FIRST_BIAS in file.tensors,
    }


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
    fields=lambda settings, file: experts_of(settings),
    mixture=True,
)
"""The architecture that ``llama`` stands for in files with experts."""

MIXTURES: Mapping[str, Architecture] = {
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _QWEN2,
        fields=_qwen2,
        mixture=True,
        rows=("mlp.shared_expert_gate.weight",),
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", EXPERTS, fields=_qwen3, mixture=True),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _ERNIE,
        fields=_ernie,
        mixture=True,
        rows=("mlp.moe_statics.e_score_correction_bias",),
    ),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", _HUNYUAN, fields=_hunyuan, mixture=True),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _MINIMAX, fields=_minimax, mixture=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        {**BALANCED, "post_attention_norm": "post_attention_layernorm"},
        fields=_glm,
        mixture=True,
    ),
}
"""By the values of ``general.architecture``."""
