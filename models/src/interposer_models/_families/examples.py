"""Small models of each family, as contents of config.json, for the conformance suite."""

from __future__ import annotations

from typing import Any

from interposer_models._families.example_sizes import SIZES, WINDOW, Examples, configs
from interposer_models._families.gpt_examples import bloom as bloom
from interposer_models._families.gpt_examples import gpt2 as gpt2
from interposer_models._families.gpt_examples import gpt_neox as gpt_neox
from interposer_models._families.gpt_examples import mpt as mpt
from interposer_models._families.gpt_examples import opt as opt
from interposer_models._families.latent_examples import deepseek_v2 as deepseek_v2
from interposer_models._families.latent_examples import deepseek_v3 as deepseek_v3
from interposer_models._families.latent_examples import deepseek_v32 as deepseek_v32
from interposer_models._families.source_examples import bart as bart
from interposer_models._families.source_examples import mbart as mbart
from interposer_models._families.source_examples import t5gemma as t5gemma
from interposer_models._families.state_examples import bamba as bamba
from interposer_models._families.state_examples import falcon_h1 as falcon_h1
from interposer_models._families.state_examples import lfm2 as lfm2
from interposer_models._families.state_examples import mamba2 as mamba2
from interposer_models._families.state_examples import nemotron_h as nemotron_h
from interposer_models._families.state_examples import qwen3_5 as qwen3_5
from interposer_models._families.state_examples import qwen3_5_moe as qwen3_5_moe
from interposer_models._families.state_examples import qwen3_next as qwen3_next


def llama() -> Examples:
    """Configs: one with grouped queries, and one with llama3 angles, biases and a tied LM head."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    long = {
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 32,
    }
    return configs("LlamaForCausalLM", grouped={}, long=long)


def mistral() -> Examples:
    """Configs: one with a window, and one with full attention."""
    return configs("MistralForCausalLM", windowed=WINDOW, whole={"sliding_window": None})


def qwen2() -> Examples:
    """Configs: one with full attention, and one with windows in the upper layers."""
    upper = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
    return configs("Qwen2ForCausalLM", whole={}, upper=upper)


def qwen3() -> Examples:
    """Configs: one with another head size and biases, and one with windows."""
    upper = {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16, **WINDOW}
    biased = {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}
    return configs("Qwen3ForCausalLM", biased=biased, upper=upper)


def mixtral() -> Examples:
    """Configs: one with a window, and one with full attention."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    return configs("MixtralForCausalLM", windowed={**experts, **WINDOW}, whole=experts)


def qwen3_moe() -> Examples:
    """Configs: one with only MoE layers, and one with windows and a dense layer."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    windowed = {
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        **WINDOW,
    }
    return configs("Qwen3MoeForCausalLM", sparse=experts, some={**experts, **windowed})


def gpt_oss() -> Examples:
    """Configs: one with the YaRN angles of the release, and one with unscaled angles."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, **WINDOW}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return configs("GptOssForCausalLM", yarn=experts, plain={**experts, **plain})


def smollm3() -> Examples:
    """Configs: one with the default unrotated layers, and one with a list of layers and windows."""
    listed = {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, **WINDOW}
    biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    usual = {"num_hidden_layers": 5}
    return configs("SmolLM3ForCausalLM", usual=usual, listed={**listed, **biases})


def olmo2() -> Examples:
    """Configs: one as released, and one with biases and a tied LM head."""
    biases = {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
    return configs("Olmo2ForCausalLM", grouped={}, biases=biases)


def granite() -> Examples:
    """Configs: one with all multipliers, and one with none."""
    multipliers = {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    }
    tied = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    return configs("GraniteForCausalLM", scaled={**multipliers, **tied}, plain={})


def granite_moe() -> Examples:
    """Configs: one with all multipliers, and one with none."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    scaled = {**granite()["scaled"], **experts}
    return {
        label: {**fields, "architectures": ["GraniteMoeForCausalLM"]}
        for label, fields in {"scaled": scaled, "plain": {**SIZES, **experts}}.items()
    }


def phi3() -> Examples:
    """Return partly rotated heads, a window, and both sets of longrope factors.

    transformers uses the short factors for sequences up to the original context. The model "long"
    has an original context of one token, whose position is 0, so that no angle shows the
    difference.
    """
    part = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    factors = {
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2],
        "long_factor": [1.0, 1.5, 3.0, 7.0, 12.0, 30.0],
    }
    mini = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}
    long = {"type": "longrope", **factors, "attention_factor": 1.2}
    short = {"rope_type": "longrope", **factors}
    return configs(
        "Phi3ForCausalLM",
        part={"rope_parameters": part},
        windowed=WINDOW,
        long={**mini, "rope_scaling": long, "original_max_position_embeddings": 1},
        short={**mini, "rope_scaling": short, "original_max_position_embeddings": 256},
    )


def ministral() -> Examples:
    """Configs: one with windows in all layers, and one with windows in some."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = {"layer_types": types, "head_dim": 32, **WINDOW}
    return configs("MinistralForCausalLM", windowed={"head_dim": 16, **WINDOW}, some=mixed)


def olmo3() -> Examples:
    """Configs: one with windows, and one with YaRN angles in full-attention layers."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    default = {"rope_type": "default", "rope_theta": 500000.0}
    rope = {"full_attention": yarn, "sliding_attention": default}
    long = {"rope_parameters": rope, "num_hidden_layers": 4}
    return configs("Olmo3ForCausalLM", windowed=WINDOW, long={**long, **WINDOW})


def exaone4() -> Examples:
    """Configs: one with windows in most layers, and one with full attention."""
    mixed = {"num_hidden_layers": 5, **WINDOW}
    full_attention = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    return configs("Exaone4ForCausalLM", mixed=mixed, whole=full_attention)


def glm4() -> Examples:
    """Configs: one as released, and one without biases that rotates heads as a whole."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    fully_rotated = {"rope_parameters": rope, "attention_bias": False, "tie_word_embeddings": True}
    return configs(
        "Glm4ForCausalLM", half={"head_dim": 16}, whole={"head_dim": 32, **fully_rotated}
    )


def ernie4_5() -> Examples:
    """Configs: one as released, and one with biases and an untied LM head."""
    biased = {"use_bias": True, "tie_word_embeddings": False, "head_dim": 16}
    return configs("Ernie4_5ForCausalLM", tied={"head_dim": 32}, biased=biased)


def ernie4_5_moe() -> Examples:
    """Configs: one with a dense first layer, and one with an MoE layer at every second index."""
    experts = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32}
    every_second = {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}
    every_second |= {
        "num_hidden_layers": 4,
        "moe_num_shared_experts": 0,
        "tie_word_embeddings": False,
    }
    return configs("Ernie4_5_MoeForCausalLM", usual=experts, some={**experts, **every_second})


def hunyuan_dense() -> Examples:
    """Configs: one with a raised rotary base, and one with biases."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    biases = {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}
    return configs(
        "HunYuanDenseV1ForCausalLM",
        raised={"rope_parameters": rope, "head_dim": 16},
        biases=biases,
    )


def hunyuan_moe() -> Examples:
    """Configs: one with a raised rotary base, and one with biases and one expert per token."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    raised = {"rope_parameters": rope, "head_dim": 16, "num_experts": 6, "moe_topk": 3}
    biases = {"attention_bias": True, "head_dim": 32, "num_experts": 4, "moe_topk": 1}
    return configs("HunYuanMoEV1ForCausalLM", raised=raised, biases=biases)


def gemma2() -> Examples:
    """Configs: one as released, and one without soft caps and with an untied LM head."""
    free = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
    }
    return configs("Gemma2ForCausalLM", capped={"head_dim": 16, **WINDOW}, free={**free, **WINDOW})


def gemma3() -> Examples:
    """Configs: one with both layer types, and one with scaled angles and capped logits."""
    mixed = {"head_dim": 16, "num_hidden_layers": 6, **WINDOW}
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    scaled = {
        "rope_parameters": rope,
        "layer_types": types,
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 20.0,
    }
    return configs("Gemma3ForCausalLM", mixed=mixed, scaled={**scaled, **WINDOW})


def gemma4() -> Examples:
    """Configs: one that shares caches as released, one without sharing, and one of equal layers."""
    small: dict[str, Any] = {
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
    }
    shared = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, **WINDOW}
    caps = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0}
    not_shared = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, **caps, **WINDOW}
    full_attention = {"layer_types": ["full_attention"] * 6, "num_kv_shared_layers": 2}
    plain = {"global_head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}
    return configs(
        "Gemma4ForCausalLM",
        shared={**small, **shared},
        apart={**small, **not_shared},
        whole={**small, **full_attention, **plain},
    )


def cohere2() -> Examples:
    """Configs: one with both layer types, and one with biases and an untied LM head."""
    mixed = {"num_hidden_layers": 5, **WINDOW}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    biases = {"attention_bias": True, "tie_word_embeddings": False, "layer_types": types}
    return configs("Cohere2ForCausalLM", mixed=mixed, biases={**biases, **WINDOW})


def starcoder2() -> Examples:
    """Configs: one with windows, and one without biases."""
    plain = {"use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False}
    return configs("Starcoder2ForCausalLM", windowed=WINDOW, plain=plain)


def llama4() -> Examples:
    """Configs: one with all layer types, one with dense layers, and one with a list of layers."""
    experts = {"num_local_experts": 5, "intermediate_size": 48, "intermediate_size_mlp": 96}
    chunks = {"attention_chunk_size": 16, "floor_scale": 8, "num_hidden_layers": 4}
    dense_layers = {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2}
    types = ["full_attention", "chunked_attention", "chunked_attention"]
    listed = {
        "layer_types": types,
        "no_rope_layers": [1, 0, 1],
        "moe_layers": [1],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 32,
        "attention_bias": True,
        "tie_word_embeddings": True,
    }
    return configs(
        "Llama4ForCausalLM",
        released={**experts, **chunks, "head_dim": 16},
        some={**experts, **chunks, **dense_layers, "head_dim": 32},
        listed={**experts, **listed, "head_dim": 16},
    )


def qwen2_moe() -> Examples:
    """Configs: one with only MoE layers, and one with windows and a dense layer."""
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
    dense_layer = {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False}
    windows = {"use_sliding_window": True, "max_window_layers": 3, **WINDOW}
    return configs(
        "Qwen2MoeForCausalLM", sparse=experts, some={**experts, **dense_layer, **windows}
    )


def glm4_moe() -> Examples:
    """Configs: one with grouped experts after a dense layer, and one with only MoE layers."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "head_dim": 16}
    only_experts = {
        "first_k_dense_replace": 0,
        "use_qk_norm": True,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "head_dim": 32,
    }
    return configs(
        "Glm4MoeForCausalLM", groups={**experts, **groups}, alone={**experts, **only_experts}
    )


def minimax_m2() -> Examples:
    """Configs: one that rotates heads as a whole, and one that rotates a part of each head."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    part = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    fully_rotated = {"head_dim": 16, **experts}
    return configs(
        "MiniMaxM2ForCausalLM",
        whole=fully_rotated,
        part={"rope_parameters": part, "head_dim": 32, **experts},
    )
