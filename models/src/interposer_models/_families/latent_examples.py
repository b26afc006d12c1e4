"""Small models of the families with latent attention, for the conformance suite."""

from __future__ import annotations

from interposer_models._families.example_sizes import Examples, configs

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}


def deepseek_v2() -> Examples:
    """Configs: a Lite model, one with grouped experts and YaRN, and one with biases."""
    lite = {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2}
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    long = {"rope_parameters": _YARN, "routed_scaling_factor": 3.5, "first_k_dense_replace": 2}
    biases = {"attention_bias": True, "tie_word_embeddings": True, "v_head_dim": 16}
    return configs(
        "DeepseekV2ForCausalLM",
        lite={**_LATENT, **lite},
        groups={**_LATENT, **groups, **long},
        biases={**_LATENT, **biases, "routed_scaling_factor": 0.5},
    )


def deepseek_v3() -> Examples:
    """Configs: one with grouped experts and YaRN, one like Kimi, and one without latent queries."""
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    one_group = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8, "v_head_dim": 24}
    plain = {
        "q_lora_rank": None,
        "rope_interleave": False,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    }
    return configs(
        "DeepseekV3ForCausalLM",
        groups={**_LATENT, **groups, "rope_parameters": _YARN},
        one={**_LATENT, **one_group, "first_k_dense_replace": 0, "tie_word_embeddings": True},
        plain={**_LATENT, **plain},
    )


_INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 16}


def deepseek_v32() -> Examples:
    """Configs: models with indexers that select a few tokens, one token, and nearly all tokens."""
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": _YARN}
    one_token = {"n_group": 1, "topk_group": 1, "index_topk": 1, "index_head_dim": 8}
    layers = {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}
    return configs(
        "DeepseekV32ForCausalLM",
        few={**_LATENT, **_INDEXER, **groups},
        one={**_LATENT, **_INDEXER, **one_token, "first_k_dense_replace": 0, "qk_rope_head_dim": 4},
        many={
            **_LATENT,
            **_INDEXER,
            **layers,
            "index_topk": 40,
            "index_n_heads": 24,
            "n_group": 2,
            "topk_group": 1,
        },
    )
