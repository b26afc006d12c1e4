"""Plugin records of the model families, and of attention backends that only families use.

Importing this module imports no torch.
"""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, ModelEntry, Record

INTERPOSER_API = ">=1.0,<2"

# fmt: off
_DECODER = (
    "attention_bias", "dtype", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "layer_types", "max_position_embeddings", "mlp_bias", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "original_max_position_embeddings",
    "partial_rotary_factor", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "torch_dtype", "vocab_size",
)
# fmt: on
_GRANITE = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
_WINDOWS = ("max_window_layers", "use_sliding_window")
_EXPERTS = ("num_experts", "num_experts_per_tok", "num_local_experts")
_SPARSE = ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob")
# fmt: off
_GEMMA = (
    "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation",
    "query_pre_attn_scalar", "use_bidirectional_attention",
)
_GEMMA3 = (*_GEMMA, "rope_local_base_freq", "sliding_window_pattern")
_GEMMA4 = (
    "attention_k_eq_v", "enable_moe_block", "final_logit_softcapping", "global_head_dim",
    "hidden_activation", "hidden_size_per_layer_input", "num_global_key_value_heads",
    "num_kv_shared_layers", "pad_token_id", "per_layer_config", "use_bidirectional_attention",
    "use_double_wide_mlp", "vocab_size_per_layer_input",
)
_LLAMA4 = (
    *_EXPERTS, "attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale",
    "interleave_moe_layer_step", "intermediate_size_mlp", "moe_layers", "no_rope_layer_interval",
    "no_rope_layers", "use_qk_norm",
)
# Fields of group-limited MoE layers.
_GROUPS = (
    *_EXPERTS, "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_mtp_layers", "num_nextn_predict_layers",
    "routed_scaling_factor", "topk_group",
)
# Fields of latent attention (MLA).
_LATENT = (
    *_GROUPS, "kv_lora_rank", "moe_layer_freq", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "scoring_func", "topk_method", "v_head_dim",
)
# Fields of Mamba-2 mixers.
_STATES = ("conv_kernel", "n_groups", "use_bias", "use_conv_bias")
_BAMBA = (
    "attn_layer_indices", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
    "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
)
# Fields of encoder and decoder.
_SIDES = (
    "activation_function", "d_model", "decoder_attention_heads", "decoder_ffn_dim",
    "decoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layers",
    "scale_embedding",
)
# Fields of Gated DeltaNet mixers.
_DELTA = (
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
)
# fmt: on

# The class of each family, and the fields of config.json that it reads in addition to _DECODER.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama": (),
    "Mistral": (),
    "Qwen2": _WINDOWS,
    "Qwen3": _WINDOWS,
    "Mixtral": _EXPERTS,
    "Qwen3Moe": (*_WINDOWS, *_EXPERTS, *_SPARSE),
    "GptOss": (*_EXPERTS, "swiglu_alpha", "swiglu_limit"),
    "SmolLM3": ("no_rope_layer_interval", "no_rope_layers", "use_sliding_window"),
    "Olmo2": (),
    "Granite": _GRANITE,
    "GraniteMoe": (*_GRANITE, *_EXPERTS),
    "Phi3": (),
    "Ministral": (),
    "Ministral3": (),
    "Olmo3": (),
    "Exaone4": ("sliding_window_pattern",),
    "Glm4": (),
    "Ernie4_5": ("use_bias",),
    "Ernie4_5_Moe": (
        *_EXPERTS,
        "moe_intermediate_size",
        "moe_k",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_layer_start_index",
        "moe_num_experts",
        "moe_num_shared_experts",
        "use_bias",
    ),
    "HunYuanDenseV1": (),
    "HunYuanMoEV1": (*_EXPERTS, "moe_topk"),
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA3,
    "Gemma4": _GEMMA4,
    "Cohere2": ("layer_norm_eps", "logit_scale", "sliding_window_pattern"),
    "Starcoder2": ("norm_epsilon", "use_bias"),
    "Glm4Moe": (*_GROUPS, "use_qk_norm"),
    "MiniMaxM2": (*_EXPERTS, "rotary_dim"),
    "DeepseekV2": _LATENT,
    "DeepseekV3": (*_LATENT, "rope_interleave"),
    "DeepseekV32": (
        *_LATENT,
        "index_head_dim",
        "index_n_heads",
        "index_topk",
        "mlp_layer_types",
        "rope_interleave",
    ),
    "Qwen2Moe": (*_WINDOWS, *_EXPERTS, *_SPARSE, "qkv_bias", "shared_expert_intermediate_size"),
    "Lfm2": (
        "block_auto_adjust_ff_dim",
        "block_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "conv_L_cache",
        "conv_bias",
        "full_attn_idxs",
        "norm_eps",
        "tie_embedding",
    ),
    "Mamba2": (
        *_STATES,
        "expand",
        "layer_norm_epsilon",
        "num_heads",
        "state_size",
        "time_step_limit",
    ),
    "NemotronH": (
        *_STATES,
        "hybrid_override_pattern",
        "layer_norm_epsilon",
        "layers_block_type",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_dt_min",
        "mamba_head_dim",
        "mamba_hidden_act",
        "mamba_n_groups",
        "mamba_num_heads",
        "mlp_hidden_act",
        "moe_intermediate_size",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "ssm_state_size",
        "time_step_min",
        "topk_group",
    ),
    "Bamba": _BAMBA,
    "FalconH1": (
        *_BAMBA,
        "attention_in_multiplier",
        "attention_out_multiplier",
        "embedding_multiplier",
        "key_multiplier",
        "lm_head_multiplier",
        "mamba_d_ssm",
        "mamba_norm_before_gate",
        "mamba_rms_norm",
        "mlp_multipliers",
        "projectors_bias",
        "ssm_in_multiplier",
        "ssm_multipliers",
        "ssm_out_multiplier",
    ),
    "Qwen3_5": _DELTA,
    "Qwen3Next": (*_DELTA, *_EXPERTS, *_SPARSE, "shared_expert_intermediate_size"),
    "Qwen3_5Moe": (*_DELTA, *_EXPERTS, "moe_intermediate_size", "shared_expert_intermediate_size"),
    "GPT2": (
        "activation_function",
        "layer_norm_epsilon",
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
    ),
    "Llama4": _LLAMA4,
    "Bloom": ("layer_norm_epsilon", "n_head", "n_layer"),
    "Mpt": (
        "attn_config",
        "d_model",
        "expansion_ratio",
        "layer_norm_epsilon",
        "max_seq_len",
        "n_heads",
        "n_layers",
    ),
    "OPT": ("activation_function", "enable_bias", "ffn_dim"),
    "GPTNeoX": ("layer_norm_eps", "rotary_emb_base", "rotary_pct", "use_parallel_residual"),
    "Bart": _SIDES,
    "MBart": _SIDES,
    "T5Gemma": (*_GEMMA, "encoder"),
    # The decoders of vision-language and speech checkpoints, whose fields are in text_config.
    "AnyText": (*_WINDOWS, *_EXPERTS, *_SPARSE, "swiglu_alpha", "swiglu_limit"),
    "Gemma3Text": _GEMMA3,
    "Gemma4Text": _GEMMA4,
    "PaliGemma": _GEMMA,
    "Llama4Text": _LLAMA4,
    "Qwen2VL": _WINDOWS,
    "Qwen3VL": _WINDOWS,
    "Qwen3VLMoe": (*_WINDOWS, *_EXPERTS, *_SPARSE),
    "Qwen3_5VL": _DELTA,
    "Qwen3_5MoeVL": (
        *_DELTA,
        *_EXPERTS,
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    "Qwen2Audio": _WINDOWS,
    "Voxtral": (),
    "Whisper": (*_SIDES, "max_source_positions", "max_target_positions", "num_mel_bins"),
}
# Architecture names that are not the class name plus "ForCausalLM", or are several.
_ARCHITECTURES = {
    "GPT2": ("GPT2LMHeadModel",),
    "Mpt": ("MptForCausalLM", "MPTForCausalLM"),
    "Bart": ("BartForConditionalGeneration",),
    "MBart": ("MBartForConditionalGeneration",),
    "T5Gemma": ("T5GemmaForConditionalGeneration",),
    "AnyText": (
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "InternVLForConditionalGeneration",
    ),
    "Gemma3Text": ("Gemma3ForConditionalGeneration",),
    "Gemma4Text": ("Gemma4ForConditionalGeneration",),
    "PaliGemma": ("PaliGemmaForConditionalGeneration",),
    "Llama4Text": ("Llama4ForConditionalGeneration",),
    "Qwen2VL": ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3VL": ("Qwen3VLForConditionalGeneration",),
    "Qwen3VLMoe": ("Qwen3VLMoeForConditionalGeneration",),
    "Qwen3_5VL": ("Qwen3_5ForConditionalGeneration",),
    "Qwen3_5MoeVL": ("Qwen3_5MoeForConditionalGeneration",),
    "Qwen2Audio": ("Qwen2AudioForConditionalGeneration",),
    "Voxtral": ("VoxtralForConditionalGeneration",),
    "Whisper": ("WhisperForConditionalGeneration",),
}
# Module names that are not the class name in lower case.
_MODULES = {
    "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe",
    "GptOss": "gpt_oss",
    "GPTNeoX": "gpt_neox",
    "GraniteMoe": "granite_moe",
    "Glm4Moe": "glm4_moe",
    "MiniMaxM2": "minimax_m2",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "DeepseekV32": "deepseek_v32",
    "Ernie4_5": "ernie4_5",
    "HunYuanDenseV1": "hunyuan_dense",
    "HunYuanMoEV1": "hunyuan_moe",
    "NemotronH": "nemotron_h",
    "FalconH1": "falcon_h1",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
    "Qwen3Next": "qwen3_next",
    "AnyText": "any_text",
    "Gemma3Text": "gemma3_text",
    "Gemma4Text": "gemma4_text",
    "Llama4Text": "llama4_text",
    "Qwen2VL": "qwen2_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3_5VL": "qwen3_5_vl",
    "Qwen3_5MoeVL": "qwen3_5_moe_vl",
    "Qwen2Audio": "qwen2_audio",
}
# The modules of families that share one, by the name of the family's record.
_SHARED_MODULES = {
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "ernie4_5": "ernie",
    "ernie4_5_moe": "ernie",
    "bamba": "granite",
    "falcon_h1": "mamba",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "glm4": "glm",
    "glm4_moe": "glm",
    "granite_moe": "granite",
    "hunyuan_dense": "hunyuan",
    "hunyuan_moe": "hunyuan",
    "lfm2": "mamba",
    "mamba2": "mamba",
    "mbart": "bart",
    "ministral": "llama",
    "ministral3": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron_h": "mamba",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_moe": "qwen",
    "smollm3": "llama",
    "t5gemma": "gemma",
    "any_text": "vision_language",
    "gemma3_text": "vision_language",
    "gemma4_text": "vision_language",
    "llama4_text": "vision_language",
    "paligemma": "vision_language",
    "qwen2_vl": "vision_language",
    "qwen3_vl": "vision_language",
    "qwen3_vl_moe": "vision_language",
    "qwen3_5_vl": "vision_language",
    "qwen3_5_moe_vl": "vision_language",
    "qwen2_audio": "vision_language",
    "voxtral": "vision_language",
}
# Attention backends of some families only: name, class, whether torch.compile can trace it.
_BACKENDS: tuple[tuple[str, str, bool], ...] = (
    ("latent", "interposer_ops.layers.attention:LatentBackend", True),
    ("latent_sparse", "interposer_models._decoder.sparse_attention:SparseLatentBackend", True),
    ("indexer", "interposer_models._decoder.sparse_attention:IndexerBackend", True),
)


@hookimpl
def interposer_records() -> list[Record]:
    """Return the plugin records of all model families and of their special attention backends."""
    backends = (_attention_entry(*fields) for fields in _BACKENDS)
    return [
        *backends,
        *(_model_entry(family, config_fields) for family, config_fields in _FAMILIES.items()),
    ]


def _attention_entry(name: str, target: str, traceable: bool) -> AttentionEntry:
    # The backends only call bound kernels, and a policy requires these properties of kernels too.
    properties = {"deterministic", "graph_safe", *(["traceable"] if traceable else [])}
    return AttentionEntry(name, target, score=0.0, properties=frozenset(properties))


def _model_entry(family: str, reads: tuple[str, ...]) -> ModelEntry:
    name = _MODULES.get(family, family.lower())
    return ModelEntry(
        _ARCHITECTURES.get(family, (f"{family}ForCausalLM",)),
        name,
        f"interposer_models._families.{_SHARED_MODULES.get(name, name)}:{family}",
        examples=f"interposer_models._families.examples:{name}",
        reads=(*_DECODER, *reads),
    )
