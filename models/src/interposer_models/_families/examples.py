"""Small example configs (config.json) of each model family, for the conformance suite."""

from __future__ import annotations

from typing import Any

Examples = dict[str, dict[str, Any]]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    # Larger than in real configs, so that random small models have clearly different logits.
    "initializer_range": 0.1,
    # No special tokens: generation then ends only at the token limit.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 24}


def configs(architecture: str, **changes: dict[str, Any]) -> Examples:
    """Return config.json contents of an architecture by label: common fields and ``changes``."""
    return {
        label: {"architectures": [architecture], **SIZES, **fields}
        for label, fields in changes.items()
    }


def gpt2() -> Examples:
    """Return configs: as released, with untied LM head and own MLP size, and with other scales."""
    untied = {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "quick_gelu"}
    scales = {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 128}
    special = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    released = {"architectures": ["GPT2LMHeadModel"], **sizes, **special}
    return {
        "released": released,
        "own sizes": {**released, **untied},
        "other scales": {**released, **scales, "n_head": 2},
    }


def opt() -> Examples:
    """Return configs: as released, with untied LM head and quick GELU, and without biases."""
    sizes = {"ffn_dim": 96, "init_std": 0.1, "word_embed_proj_dim": 64}
    untied = {"tie_word_embeddings": False, "activation_function": "quick_gelu"}
    return configs(
        "OPTForCausalLM",
        released=sizes,
        own={**sizes, **untied},
        plain={**sizes, "enable_bias": False, "ffn_dim": 160},
    )


def gpt_neox() -> Examples:
    """Return configs: one like Pythia, one with sequential sublayers, and one without biases."""
    turns = {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}
    plain = {"attention_bias": False, "tie_word_embeddings": True, "rotary_emb_base": 500.0}
    return configs(
        "GPTNeoXForCausalLM", quarter={}, turns=turns, plain={"rotary_pct": 0.5, **plain}
    )


def mpt() -> Examples:
    """Return configs: as released, clipped with six heads, and with llm-foundry's field names.

    Fields that transformers ignores have the values that transformers assumes.
    """
    special = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    sizes = {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "vocab_size": 128}
    released = {"architectures": ["MptForCausalLM"], **sizes, **special}
    clipped = {"clip_qkv": 0.5, "softmax_scale": 0.4}
    first_names = {"architectures": ["MPTForCausalLM"], "attn_config": {"clip_qkv": 8.0}}
    return {
        "released": released,
        "six heads": {**released, "n_heads": 6, "d_model": 96, "attn_config": clipped},
        "first names": {**released, **first_names, "n_heads": 2, "n_layers": 2},
    }


def bloom() -> Examples:
    """Return configs: one as released, one with three heads, and one with an untied LM head."""
    special = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    sizes = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, **special}
    released = {"architectures": ["BloomForCausalLM"], **sizes}
    return {
        "released": released,
        "three heads": {**released, "n_head": 3, "hidden_size": 48},
        "own head": {**released, "tie_word_embeddings": False, "n_head": 2, "n_layer": 2},
    }


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
    """Return configs: a Lite model, one with grouped experts and YaRN, and one with biases."""
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
    """Return configs: with grouped experts and YaRN, like Kimi, and without latent queries."""
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
    """Return configs whose indexers select a few tokens, one token, or nearly all tokens."""
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


_START = {"decoder_start_token_id": 2, "is_encoder_decoder": True}


def _sides(architecture: str, **changes: dict[str, Any]) -> Examples:
    sizes = {"d_model": 64, "vocab_size": 128, "max_position_embeddings": 256, "init_std": 0.1}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    decoder = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 80}
    both = {"architectures": [architecture], **sizes, **special, **decoder, **encoder, **_START}
    return {label: {**both, **fields} for label, fields in changes.items()}


def bart() -> Examples:
    """Return configs: one as released, one with unequal sides, and one with scaled embeddings."""
    sides = {"encoder_layers": 4, "encoder_attention_heads": 2, "decoder_attention_heads": 8}
    scaled = {"scale_embedding": True, "activation_function": "relu", "forced_bos_token_id": 7}
    return _sides("BartForConditionalGeneration", released={}, sides=sides, scaled=scaled)


def mbart() -> Examples:
    """Return configs: with scaled embeddings, with a small encoder, and without changes."""
    scaled = {"scale_embedding": True, "forced_bos_token_id": 9}
    small = {"encoder_layers": 1, "encoder_ffn_dim": 32, "activation_function": "gelu_new"}
    return _sides("MBartForConditionalGeneration", released=scaled, small=small, plain={})


def whisper() -> Examples:
    """Return configs: one as released, one with unequal sides, and one with more mel bins."""
    sizes = {"max_source_positions": 40, "max_target_positions": 96, "num_mel_bins": 80}
    sides = {**sizes, "encoder_layers": 4, "encoder_attention_heads": 2, "num_mel_bins": 128}
    short = {**sizes, "decoder_layers": 1, "max_source_positions": 7, "decoder_attention_heads": 8}
    return _sides("WhisperForConditionalGeneration", released=sizes, sides=sides, short=short)


def t5gemma() -> Examples:
    """Return configs: one with windows, one with unequal sides, and one with untied embeddings."""
    special = {"pad_token_id": 0, "query_pre_attn_scalar": 16, "head_dim": 16}
    side = {**SIZES, **special, **WINDOW}
    small = {**side, "hidden_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 4}
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    full_attention = {"layer_types": ["full_attention"] * 3, "attention_bias": True, **uncapped}
    top = {"architectures": ["T5GemmaForConditionalGeneration"], "vocab_size": 128, **_START}
    top |= {"initializer_range": 0.1, "pad_token_id": 0}
    return {
        "windowed": {**top, "encoder": side, "decoder": side},
        "sides": {**top, "encoder": small, "decoder": {**side, "hidden_size": 96}},
        "own head": {
            **top,
            "encoder": {**side, **full_attention},
            "decoder": {**side, **full_attention, "tie_word_embeddings": False},
            "tie_word_embeddings": False,
        },
    }


def lfm2() -> Examples:
    """Return configs: with mixed layers, with biases and an exact MLP size, and with indices."""
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
    """Return configs: one with several groups, one with biases, and one with a tied LM head."""
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
    """Return configs: with default layer order, with another order, and with a tied LM head."""
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
    """Return configs: with experts in all or some layers, and without renormalization."""
    return configs(
        "Qwen3NextForCausalLM",
        experts=_DELTA_EXPERTS,
        some={**_DELTA_EXPERTS, "mlp_only_layers": [1]},
        raw={**_DELTA_EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2},
    )


def qwen3_5_moe() -> Examples:
    """Return configs: with default layer order, with another order, and with a tied LM head."""
    other_order = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    return configs(
        "Qwen3_5MoeForCausalLM",
        usual=_DELTA_EXPERTS,
        other={**_DELTA_EXPERTS, "layer_types": other_order},
        tied={**_DELTA_EXPERTS, "tie_word_embeddings": True},
    )


def nemotron_h() -> Examples:
    """Return configs: all layer kinds, biases, attention first, experts, and latent experts."""
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
    """Return configs: with attention in the middle, with biases, and with a tied LM head."""
    biased = {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}
    return configs(
        "BambaForCausalLM",
        middle={**_BAMBA, "attn_layer_indices": [1]},
        biased={**_BAMBA, **biased, "attn_layer_indices": [0, 2]},
        tied={**_BAMBA, "attn_layer_indices": [2], "tie_word_embeddings": True},
    )


def falcon_h1() -> Examples:
    """Return configs: without multipliers, with all, and with the norm after the gate."""
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


def llama() -> Examples:
    """Return configs: with grouped queries; with llama3 angles, biases and a tied LM head."""
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
    """Return configs: one with a window, and one with full attention."""
    return configs("MistralForCausalLM", windowed=WINDOW, whole={"sliding_window": None})


def qwen2() -> Examples:
    """Return configs: one with full attention, and one with windows in the upper layers."""
    upper = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
    return configs("Qwen2ForCausalLM", whole={}, upper=upper)


def qwen3() -> Examples:
    """Return configs: one with another head size and biases, and one with windows."""
    upper = {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16, **WINDOW}
    biased = {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}
    return configs("Qwen3ForCausalLM", biased=biased, upper=upper)


def mixtral() -> Examples:
    """Return configs: one with a window, and one with full attention."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    return configs("MixtralForCausalLM", windowed={**experts, **WINDOW}, whole=experts)


def qwen3_moe() -> Examples:
    """Return configs: one with only MoE layers, and one with windows and a dense layer."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    windowed = {
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        **WINDOW,
    }
    return configs("Qwen3MoeForCausalLM", sparse=experts, some={**experts, **windowed})


def gpt_oss() -> Examples:
    """Return configs: one with the YaRN angles of the release, and one with unscaled angles."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, **WINDOW}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return configs("GptOssForCausalLM", yarn=experts, plain={**experts, **plain})


def smollm3() -> Examples:
    """Return configs: with default unrotated layers, and with a list of layers and windows."""
    listed = {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, **WINDOW}
    biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    usual = {"num_hidden_layers": 5}
    return configs("SmolLM3ForCausalLM", usual=usual, listed={**listed, **biases})


def olmo2() -> Examples:
    """Return configs: one as released, and one with biases and a tied LM head."""
    biases = {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
    return configs("Olmo2ForCausalLM", grouped={}, biases=biases)


def granite() -> Examples:
    """Return configs: one with all multipliers, and one with none."""
    multipliers = {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    }
    tied = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    return configs("GraniteForCausalLM", scaled={**multipliers, **tied}, plain={})


def granite_moe() -> Examples:
    """Return configs: one with all multipliers, and one with none."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    scaled = {**granite()["scaled"], **experts}
    return {
        label: {**fields, "architectures": ["GraniteMoeForCausalLM"]}
        for label, fields in {"scaled": scaled, "plain": {**SIZES, **experts}}.items()
    }


def phi3() -> Examples:
    """Return configs with partial rotary embedding, a sliding window, and longrope factors.

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
    """Return configs: one with windows in all layers, and one with windows in some."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = {"layer_types": types, "head_dim": 32, **WINDOW}
    return configs("MinistralForCausalLM", windowed={"head_dim": 16, **WINDOW}, some=mixed)


def ministral3() -> Examples:
    """Return a config whose query factors change every 16 tokens."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
    return configs("Ministral3ForCausalLM", all={"head_dim": 32, "rope_parameters": rope})


def olmo3() -> Examples:
    """Return configs: one with windows, and one with YaRN angles in full-attention layers."""
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
    """Return configs: one with windows in most layers, and one with full attention."""
    mixed = {"num_hidden_layers": 5, **WINDOW}
    full_attention = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    return configs("Exaone4ForCausalLM", mixed=mixed, whole=full_attention)


def glm4() -> Examples:
    """Return configs: one as released, and one without biases that rotates heads as a whole."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    fully_rotated = {"rope_parameters": rope, "attention_bias": False, "tie_word_embeddings": True}
    return configs(
        "Glm4ForCausalLM", half={"head_dim": 16}, whole={"head_dim": 32, **fully_rotated}
    )


def ernie4_5() -> Examples:
    """Return configs: one as released, and one with biases and an untied LM head."""
    biased = {"use_bias": True, "tie_word_embeddings": False, "head_dim": 16}
    return configs("Ernie4_5ForCausalLM", tied={"head_dim": 32}, biased=biased)


def ernie4_5_moe() -> Examples:
    """Return configs: with a dense first layer, and with MoE at every second layer index."""
    experts = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32}
    every_second = {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}
    every_second |= {
        "num_hidden_layers": 4,
        "moe_num_shared_experts": 0,
        "tie_word_embeddings": False,
    }
    return configs("Ernie4_5_MoeForCausalLM", usual=experts, some={**experts, **every_second})


def hunyuan_dense() -> Examples:
    """Return configs: one with a raised rotary base, and one with biases."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    biases = {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}
    return configs(
        "HunYuanDenseV1ForCausalLM",
        raised={"rope_parameters": rope, "head_dim": 16},
        biases=biases,
    )


def hunyuan_moe() -> Examples:
    """Return configs: with a raised rotary base, and with biases and one expert per token."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    raised = {"rope_parameters": rope, "head_dim": 16, "num_experts": 6, "moe_topk": 3}
    biases = {"attention_bias": True, "head_dim": 32, "num_experts": 4, "moe_topk": 1}
    return configs("HunYuanMoEV1ForCausalLM", raised=raised, biases=biases)


def gemma2() -> Examples:
    """Return configs: one as released, and one without soft caps and with an untied LM head."""
    free = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
    }
    return configs("Gemma2ForCausalLM", capped={"head_dim": 16, **WINDOW}, free={**free, **WINDOW})


def gemma3() -> Examples:
    """Return configs: one with both layer types, and one with scaled angles and capped logits."""
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
    """Return configs: with caches shared as released, unshared, and with equal layers."""
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
    """Return configs: one with both layer types, and one with biases and an untied LM head."""
    mixed = {"num_hidden_layers": 5, **WINDOW}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    biases = {"attention_bias": True, "tie_word_embeddings": False, "layer_types": types}
    return configs("Cohere2ForCausalLM", mixed=mixed, biases={**biases, **WINDOW})


def starcoder2() -> Examples:
    """Return configs: one with windows, and one without biases."""
    plain = {"use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False}
    return configs("Starcoder2ForCausalLM", windowed=WINDOW, plain=plain)


def llama4() -> Examples:
    """Return configs: with all layer types, with dense layers, and with a list of layers."""
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
    """Return configs: one with only MoE layers, and one with windows and a dense layer."""
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
    """Return configs: with grouped experts after a dense layer, and with only MoE layers."""
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
    """Return configs that rotate heads as a whole, or only a part of each head."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    part = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    fully_rotated = {"head_dim": 16, **experts}
    return configs(
        "MiniMaxM2ForCausalLM",
        whole=fully_rotated,
        part={"rope_parameters": part, "head_dim": 32, **experts},
    )


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _text_config(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **fields}


def any_text() -> Examples:
    """Return a config of each architecture, and of each family of decoders."""
    clip = {**_VISION, "model_type": "clip_vision_model"}
    pixtral = {**_VISION, "model_type": "pixtral", "head_dim": 16}
    intern_vit = {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}
    siglip = {**_VISION, "max_image_size": {"longest_edge": 28}}
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    few = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, **WINDOW}
    upper = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
    examples = {
        "llava": ("Llava", clip, _text_config("llama"), True),
        "llava-next": ("LlavaNext", clip, _text_config("mistral", **WINDOW), False),
        "mistral3": ("Mistral3", pixtral, _text_config("mistral", head_dim=32), False),
        "ministral3": (
            "Mistral3",
            pixtral,
            {**ministral3()["all"], "model_type": "ministral3"},
            True,
        ),
        "idefics3": ("Idefics3", siglip, _text_config("llama"), False),
        "smolvlm": ("SmolVLM", siglip, _text_config("llama", rope_theta=273768.0), True),
        "internvl": ("InternVL", intern_vit, _text_config("qwen2", **upper), True),
        "qwen3": ("InternVL", intern_vit, _text_config("qwen3", head_dim=16), False),
        "qwen3-moe": ("InternVL", intern_vit, _text_config("qwen3_moe", **experts), False),
        "gpt-oss": ("InternVL", intern_vit, _text_config("gpt_oss", **few), False),
    }
    return {
        label: {
            "architectures": [f"{name}ForConditionalGeneration"],
            "vision_config": vision,
            "text_config": text,
            "tie_word_embeddings": is_tied,
        }
        for label, (name, vision, text, is_tied) in examples.items()
    }


def gemma3_text() -> Examples:
    """Return a config with both layer types."""
    vision = {**_VISION, "model_type": "siglip_vision_model"}
    text = {**gemma3()["mixed"], "model_type": "gemma3_text"}
    architectures = ["Gemma3ForConditionalGeneration"]
    fields = {"vision_config": vision, "text_config": text, "mm_tokens_per_image": 4}
    return {"mixed": {"architectures": architectures, **fields}}


def gemma4_text() -> Examples:
    """Return configs: a small model, and a large one whose images attend both ways."""
    texts = gemma4()
    vision = {"use_bidirectional_attention": "vision"}
    fields = {"model_type": "gemma4_text", "pad_token_id": 0}
    examples = {
        "shared": {**texts["shared"], **fields},
        "vision": {**texts["apart"], **fields, **vision},
    }
    encoder = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 64}
    return {
        label: {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "vision_config": {"model_type": "gemma4_vision", **encoder, **heads, **sizes},
            "text_config": text,
        }
        for label, text in examples.items()
    }


def paligemma() -> Examples:
    """Return configs of PaliGemma and PaliGemma 2, whose context is one window."""
    vision = {**_VISION, "model_type": "siglip_vision_model"}
    second = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "sliding_window": 200}
    texts = {
        "first": _text_config("gemma", head_dim=16),
        "second": _text_config("gemma2", head_dim=16, **second),
    }
    return {
        label: {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "vision_config": vision,
            "text_config": text,
            "projection_dim": SIZES["hidden_size"],
        }
        for label, text in texts.items()
    }


def llama4_text() -> Examples:
    """Return a config with all layer types."""
    vision = {**_VISION, "vision_output_dim": 48, "projector_input_dim": 32}
    text = {**llama4()["released"], "model_type": "llama4_text"}
    architectures = ["Llama4ForConditionalGeneration"]
    return {
        "released": {"architectures": architectures, "vision_config": vision, "text_config": text}
    }


# M-RoPE of heads of 16 elements.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def qwen2_vl() -> Examples:
    """Return configs: of Qwen2-VL as first released, without text_config, and of Qwen2.5-VL."""
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 14}
    first = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **sizes}
    second = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, **sizes}
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    upper = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
    return {
        "released": {
            **configs("Qwen2VLForConditionalGeneration", all=rope)["all"],
            "vision_config": first,
            "tie_word_embeddings": True,
        },
        "windowed": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": {**second, "fullatt_block_indexes": [0]},
            "text_config": _text_config("qwen2_5_vl_text", rope_parameters=_MROPE, **upper),
        },
    }


_QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl() -> Examples:
    """Return a config with interleaved M-RoPE and a tied LM head."""
    rope = {**_MROPE, "mrope_interleaved": True}
    return {
        "tied": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "vision_config": _QWEN3_VISION,
            "text_config": _text_config("qwen3_vl_text", head_dim=16, rope_parameters=rope),
            "tie_word_embeddings": True,
        }
    }


def qwen3_vl_moe() -> Examples:
    """Return a config with a dense layer."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    text = {**experts, "mlp_only_layers": [1], "rope_parameters": _MROPE}
    return {
        "some": {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "vision_config": _QWEN3_VISION,
            "text_config": _text_config("qwen3_vl_moe_text", **text),
            "tie_word_embeddings": False,
        }
    }


def qwen3_5_vl() -> Examples:
    """Return a config with M-RoPE on a part of each head."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    text = {**_DELTA, "rope_parameters": {**rope, "rope_theta": 10000.0}}
    return {
        "half": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "vision_config": _QWEN3_VISION,
            "text_config": _text_config("qwen3_5_text", **text),
            "tie_word_embeddings": False,
        }
    }


def qwen3_5_moe_vl() -> Examples:
    """Return a config with M-RoPE on a part of each head, and experts in all layers."""
    dense = qwen3_5_vl()["half"]
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    text = {**dense["text_config"], **experts, "shared_expert_intermediate_size": 48}
    return {
        "half": {
            **dense,
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": {**text, "model_type": "qwen3_5_moe_text"},
        }
    }


def qwen2_audio() -> Examples:
    """Return a config with windows in one layer."""
    encoder = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "max_source_positions": 20,
    }
    upper = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
    return {
        "windowed": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "audio_config": encoder,
            "text_config": _text_config("qwen2", **upper),
            "audio_token_index": 250,
        }
    }


def voxtral() -> Examples:
    """Return a config whose heads are larger than the hidden size divided by their number."""
    encoder = {
        "model_type": "voxtral_encoder",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "num_mel_bins": 16,
        "max_source_positions": 20,
    }
    return {
        "wide": {
            "architectures": ["VoxtralForConditionalGeneration"],
            "audio_config": encoder,
            "text_config": _text_config("llama", head_dim=32),
            "audio_token_id": 24,
        }
    }
