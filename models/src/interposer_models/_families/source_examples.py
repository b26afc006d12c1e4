"""Small encoder-decoder models, for the conformance suite."""

from __future__ import annotations

from typing import Any

from interposer_models._families.example_sizes import SIZES, WINDOW, Examples

_START = {"decoder_start_token_id": 2, "is_encoder_decoder": True}


def _sides(architecture: str, **changes: dict[str, Any]) -> Examples:
    sizes = {"d_model": 64, "vocab_size": 128, "max_position_embeddings": 256, "init_std": 0.1}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    decoder = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 80}
    both = {"architectures": [architecture], **sizes, **special, **decoder, **encoder, **_START}
    return {label: {**both, **fields} for label, fields in changes.items()}


def bart() -> Examples:
    """Configs: one as released, one with unequal sides, and one with scaled embeddings."""
    sides = {"encoder_layers": 4, "encoder_attention_heads": 2, "decoder_attention_heads": 8}
    scaled = {"scale_embedding": True, "activation_function": "relu", "forced_bos_token_id": 7}
    return _sides("BartForConditionalGeneration", released={}, sides=sides, scaled=scaled)


def mbart() -> Examples:
    """Configs: one with scaled embeddings, one with a small encoder, and one without changes."""
    scaled = {"scale_embedding": True, "forced_bos_token_id": 9}
    small = {"encoder_layers": 1, "encoder_ffn_dim": 32, "activation_function": "gelu_new"}
    return _sides("MBartForConditionalGeneration", released=scaled, small=small, plain={})


def t5gemma() -> Examples:
    """Configs: one with windows, one with unequal sides, and one with untied embeddings."""
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
