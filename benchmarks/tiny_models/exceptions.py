"""Families whose tiny configuration needs more than rules, each with the reason."""

from __future__ import annotations

from typing import Any

# The code of these reads sections of the rotary embedding that their configuration leaves out.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_HALF_SECTIONS = {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
# Windows as large as a stage's map: a bias of a fixed size would not fit the smaller window.
_WINDOW = {"window_size": 2, "image_size": 64}

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl": {"text_config.rope_parameters": _SECTIONS, "vision_config.hidden_size": 64},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_5_vl": {"text_config.rope_parameters": _SECTIONS},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": _SECTIONS},
    "paddleocr_vl": {"text_config.rope_parameters": _SECTIONS},
    "glm4v_text": {"rope_parameters": _HALF_SECTIONS},
    "glm4v_moe_text": {"rope_parameters": _HALF_SECTIONS},
    "glm_image_text": {"rope_parameters": _HALF_SECTIONS},
    "glm4v": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm46v": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glmga": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm4v_moe": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm_image": {"text_config.rope_parameters": _HALF_SECTIONS},
    "swin": _WINDOW,
    "donut-swin": _WINDOW,
    # One layer of each kind: what decides is a period or a list of places, not a list of kinds.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # Experts that the defaults leave out.
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    # Head sizes that the defaults leave to the checkpoint.
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 16},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 32},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "chameleon": {"vocabulary_map": {"<image>": 300, **{f"IMGIMG{n}Z": 310 + n for n in range(9)}}},
    # How far they look ahead is left to the checkpoint.
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    # Tokens of images that the defaults leave out.
    "blip-2": {"image_token_index": 500},
    "instructblip": {"image_token_index": 500},
    "instructblipvideo": {"video_token_index": 500},
    # Rotations are at least 32 wide.
    "clvp": {
        "text_config.num_attention_heads": 2,
        "speech_config.num_attention_heads": 2,
        "decoder_config.num_attention_heads": 2,
    },
    # Queries, half as wide as values, are rounded up to 64.
    "xlstm": {"hidden_size": 128},
    "blt": {"encoder_hash_byte_group_vocab": 512},
    # 64 frames are thousands of patches.
    "vjepa2": {"frames_per_clip": 4},
    # Random weights speak for minutes.
    "vits": {"speaking_rate": 100.0},
}
