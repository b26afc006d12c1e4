"""The architectures with experts that are read.

In a file, the matrices of a layer's experts are three tensors ``[E, outputs, inputs]``.

Source: the tables of gguf-py (gguf/constants.py), the conversions of llama.cpp and its graphs,
which say what the metadata leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import FIRST_BIAS, Architecture, multiplied
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._settings import Settings

# Numbers of expert_gating_func.
_SOFTMAX, _SIGMOID = 1, 2


def _experts(settings: Settings, scaled: bool = False) -> dict[str, Any]:
    """Return the fields of config.json that every family with experts has.

    Args:
        scaled: the family multiplies the weights of the chosen experts by a number.
    """
    scale = settings.number("expert_weights_scale", 1.0)
    # Some conversions write 0 where there is none.
    if not scaled and scale not in (0.0, 1.0):
        raise UnsupportedModelError(
            settings.path, f"has expert_weights_scale {scale}, which its family has not"
        )
    return {
        "num_local_experts": settings.integer("expert_count"),
        "num_experts_per_tok": settings.integer("expert_used_count"),
    }


def _small(settings: Settings) -> dict[str, Any]:
    """Return the same of experts whose size is not that of an MLP."""
    size = settings.integer("expert_feed_forward_length")
    return {**_experts(settings), "moe_intermediate_size": size}


def _qwen2(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Qwen2's fields; none of its weights are renormalized, as llama.cpp computes them."""
    return {
        **_small(settings),
        "shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": FIRST_BIAS in file.tensors,
    }


def _qwen3(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Qwen3's fields; all its weights are renormalized, as llama.cpp computes them."""
    return {**_small(settings), "norm_topk_prob": True}


def _granite(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {**multiplied(settings, file), **_experts(settings)}


def _ernie(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {
        **_small(settings),
        "moe_num_shared_experts": settings.integer("expert_shared_count", 0),
        "moe_layer_start_index": settings.integer("leading_dense_block_count", 0),
        "moe_layer_interval": settings.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Hunyuan's fields; the expert that every token visits has the size of the others."""
    return {
        **_experts(settings),
        "intermediate_size": settings.integer("expert_feed_forward_length"),
    }


def _minimax(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    _scores_by_sigmoid(settings, default=_SIGMOID)
    size = settings.integer("expert_feed_forward_length")
    rotated = settings.integer("rope.dimension_count")
    return {**_experts(settings), "intermediate_size": size, "rotary_dim": rotated}


def _glm(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    _scores_by_sigmoid(settings, default=_SIGMOID)
    return {
        **_grouped(settings),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": FIRST_BIAS in file.tensors,
    }


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
        **_grouped(settings),
        "num_key_value_heads": settings.integer("attention.head_count"),
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": settings.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": settings.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": settings.integer(f"attention.value_length{stated}"),
    }
    if _scores_by_sigmoid(settings, _SIGMOID if balanced else _SOFTMAX, other=_SOFTMAX):
        return fields
    if fields.pop("norm_topk_prob"):
        raise UnsupportedModelError(
            settings.path, "has expert_weights_norm with the scores of DeepSeek-V2"
        )
    how = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return {**fields, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": how}


def _grouped(settings: Settings) -> dict[str, Any]:
    """Return the fields of families whose experts are in groups."""
    return {
        **_experts(settings, scaled=True),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "n_shared_experts": settings.integer("expert_shared_count", 0),
        "first_k_dense_replace": settings.integer("leading_dense_block_count", 0),
        "n_group": settings.integer("expert_group_count", 1),
        "topk_group": settings.integer("expert_group_used_count", 1),
        "norm_topk_prob": settings.flag("expert_weights_norm", False),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0) or 1.0,
    }


def _scores_by_sigmoid(settings: Settings, default: int, other: int | None = None) -> bool:
    """Say whether the scores of experts are sigmoids.

    Raises: UnsupportedModelError: they are neither that nor what the number ``other`` stands for.
    """
    number = settings.integer("expert_gating_func", default) or default
    if number not in (_SIGMOID, other):
        raise UnsupportedModelError(
            settings.path, f"has expert_gating_func {number}, which its family has not"
        )
    return number == _SIGMOID


def _gates_first(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), 1)


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return rows of keys and of values by head, of ``[N, R, K]`` and ``[N, V, R]``."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN2 = {
    **_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED = {
    **_NAMES,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_BALANCED = {**_SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK = {
    **_BALANCED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
_ERNIE = {**_SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
_HUNYUAN = {
    **_NAMES,
    "ffn_gate_inp": "mlp.gate.wg",
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_MINIMAX = {**_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _MIXTRAL,
    permuted=True,
    fields=lambda settings, file: _experts(settings),
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
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _NAMES, fields=_qwen3, mixture=True),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        _GRANITE,
        permuted=True,
        fields=_granite,
        mixture=True,
        joined={"ffn_gate_exps.weight": ("ffn_up_exps.weight", _gates_first)},
    ),
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
        {**_BALANCED, "post_attention_norm": "post_attention_layernorm"},
        fields=_glm,
        mixture=True,
    ),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK,
        fields=_deepseek,
        mixture=True,
        joined={"attn_k_b.weight": ("attn_v_b.weight", _keys_and_values)},
    ),
}
"""By the values of ``general.architecture``."""
