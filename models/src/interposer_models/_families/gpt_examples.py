"""Small models of the families of GPT, for the conformance suite."""

from __future__ import annotations

from interposer_models._families.example_sizes import Examples, configs


def gpt2() -> Examples:
    """Configs: one as released, one with untied LM head and own MLP size, one with other scales."""
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
    """Configs: one as released, one with untied LM head and quick GELU, and one without biases."""
    sizes = {"ffn_dim": 96, "init_std": 0.1, "word_embed_proj_dim": 64}
    untied = {"tie_word_embeddings": False, "activation_function": "quick_gelu"}
    return configs(
        "OPTForCausalLM",
        released=sizes,
        own={**sizes, **untied},
        plain={**sizes, "enable_bias": False, "ffn_dim": 160},
    )


def gpt_neox() -> Examples:
    """Configs: one like Pythia, one with sequential sublayers, and one without biases."""
    turns = {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}
    plain = {"attention_bias": False, "tie_word_embeddings": True, "rotary_emb_base": 500.0}
    return configs(
        "GPTNeoXForCausalLM", quarter={}, turns=turns, plain={"rotary_pct": 0.5, **plain}
    )


def mpt() -> Examples:
    """Configs: one as released, one clipped with six heads, and one with llm-foundry's field names.

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
    """Configs: one as released, one with three heads, and one with an untied LM head."""
    special = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    sizes = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, **special}
    released = {"architectures": ["BloomForCausalLM"], **sizes}
    return {
        "released": released,
        "three heads": {**released, "n_head": 3, "hidden_size": 48},
        "own head": {**released, "tie_word_embeddings": False, "n_head": 2, "n_layer": 2},
    }
