"""Small models of each architecture that GGUF files of llama.cpp have."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS, HALF = {"head_dim": 16}, {"head_dim": 32}
WINDOW = {"sliding_window": 24}
FACTORS = {"short_factor": [1.0, 1.5] * 4, "long_factor": [1.0, 3.0] * 4}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-4}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": HEADS,
    "gemma2": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5},
    "gemma3_text": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "cohere2": {**WINDOW, "logit_scale": 0.5, "layer_norm_eps": 1e-4},
    "olmo2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    },
    "glm4": {**HEADS, "rms_norm_eps": 1e-5},
    "exaone4": {**HEADS, **WINDOW},
    "smollm3": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    "starcoder2": {"norm_epsilon": 1e-4, "sliding_window": None},
    "gpt2": GPT2,
    "hunyuan_v1_dense": HEADS,
    "ernie4_5": {**HEADS, "use_bias": False},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**HEADS, **EXPERTS, "norm_topk_prob": True},
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_moe": {**HEADS, "num_experts": 6, "moe_topk": 3},
    "minimax_m2": {
        **HALF,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "glm4_moe": {
        **HEADS,
        **ROUTED,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {**LATENT, "rope_parameters": YARN, "max_position_embeddings": 256},
    "phi3": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 8},
        "original_max_position_embeddings": 8,
    },
}
NAMES = {
    "hunyuan_v1_dense": "hunyuan-dense",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
DELTA_EXPERTS = {
    **DELTA,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
NEMOTRON = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-4,
}
BAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
MULTIPLIED = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.3],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}
INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 16}
LONG_OSS = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
SPLIT = ["sliding_attention", "full_attention"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "layer_norm_epsilon": 1e-4,
        "intermediate_size": 1,
    },
    "nemotron_h": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "nemotron_h_moe": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32,
        "routed_scaling_factor": 2.5,
        "n_group": 2,
        "topk_group": 1,
    },
    "bamba": {**BAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**BAMBA, **MULTIPLIED, **HEADS, "mamba_d_ssm": 128},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 32,
        "norm_eps": 1e-4,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **HEADS,
        **WINDOW,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "rope_parameters": LONG_OSS,
    },
    "llama4_text": {
        **HEADS,
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "intermediate_size": 64,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
    "olmo3": {**WINDOW, "rms_norm_eps": 1e-5},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.1},
    "gpt_neox": {"use_parallel_residual": False},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 128,
        "layer_types": SPLIT * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 20.0,
        **WINDOW,
    },
    "deepseek_v32": {
        **LATENT,
        **INDEXER,
        "rope_parameters": YARN,
        "max_position_embeddings": 256,
    },
    "mistral3": {**HALF, "sliding_window": None},
}
FIELDS |= HYBRIDS | OTHERS
NAMES |= {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "olmo3": "olmo2",
    "gpt_neox": "gptneox",
    "gemma4_text": "gemma4",
    "deepseek_v32": "deepseek32",
}
TYPES = {"nemotron_h_moe": "nemotron_h", "mistral3": "mistral"}
"""The model type of a kind that has another name."""
