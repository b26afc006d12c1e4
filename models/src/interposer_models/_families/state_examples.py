"""Small models of the families with recurrent states, for the conformance suite."""

from __future__ import annotations

from interposer_models._families.example_sizes import Examples, configs


def lfm2() -> Examples:
    """Configs: one with mixed layers, one with biases and an exact MLP size, one with indices."""
    kinds = ["conv", "full_attention", "conv"]
    return configs(
        "Lfm2ForCausalLM",
        mixed={"layer_types": kinds, "block_multiple_of": 16, "rope_theta": 10000.0},
        biased={
            "layer_types": kinds[::-1],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        numbered={"full_attn_idxs": [1, 2], "conv_L_cache": 8, "block_ffn_dim_multiplier": 1.5},
    )


def mamba2() -> Examples:
    """Configs: one with several groups, one with biases, and one with a tied LM head."""
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
    return configs(
        "Mamba2ForCausalLM",
        grouped=sizes,
        biased={**sizes, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
        tied={**sizes, "n_groups": 1, "tie_word_embeddings": True},
    )


_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def qwen3_5() -> Examples:
    """Configs: one with the default layer order, one with another, and one with a tied LM head."""
    other_order = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    tied = {"tie_word_embeddings": True, "attention_bias": True, "linear_conv_kernel_dim": 3}
    return configs(
        "Qwen3_5ForCausalLM",
        usual=_DELTA,
        other={**_DELTA, "layer_types": other_order, "linear_num_value_heads": 2},
        tied={**_DELTA, **tied},
    )


_DELTA_EXPERTS = {
    **_DELTA,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


def qwen3_next() -> Examples:
    """Configs: one with experts in all layers, one with some, and one without renormalization."""
    return configs(
        "Qwen3NextForCausalLM",
        experts=_DELTA_EXPERTS,
        some={**_DELTA_EXPERTS, "mlp_only_layers": [1]},
        raw={**_DELTA_EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2},
    )


def qwen3_5_moe() -> Examples:
    """Configs: one with the default layer order, one with another, and one with a tied LM head."""
    other_order = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    return configs(
        "Qwen3_5MoeForCausalLM",
        usual=_DELTA_EXPERTS,
        other={**_DELTA_EXPERTS, "layer_types": other_order},
        tied={**_DELTA_EXPERTS, "tie_word_embeddings": True},
    )


def nemotron_h() -> Examples:
    """Configs: one with all layer kinds, biases, attention first, experts, and latent experts."""
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    sizes = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    }
    experts = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
    }
    return configs(
        "NemotronHForCausalLM",
        kinds={**sizes, "layers_block_type": kinds},
        biased={**sizes, "layers_block_type": kinds, "mlp_bias": True, "use_bias": True},
        attention={**sizes, "layers_block_type": kinds[::-1], "use_conv_bias": False},
        experts={**sizes, **experts},
        latent={**sizes, **experts, "moe_latent_size": 24, "n_group": 2, "norm_topk_prob": False},
    )


_BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}


def bamba() -> Examples:
    """Configs: one with attention in the middle, one with biases, and one with a tied LM head."""
    biased = {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}
    return configs(
        "BambaForCausalLM",
        middle={**_BAMBA, "attn_layer_indices": [1]},
        biased={**_BAMBA, **biased, "attn_layer_indices": [0, 2]},
        tied={**_BAMBA, "attn_layer_indices": [2], "tie_word_embeddings": True},
    )


def falcon_h1() -> Examples:
    """Configs: one without multipliers, one with all, and one with the norm after the gate."""
    sizes = {**_BAMBA, "mamba_d_ssm": 96}
    factors = {
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
    norm_after_gate = {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
    }
    return configs(
        "FalconH1ForCausalLM",
        plain=sizes,
        factors={**sizes, **factors},
        behind={**sizes, **norm_after_gate, "mamba_d_ssm": None},
    )
