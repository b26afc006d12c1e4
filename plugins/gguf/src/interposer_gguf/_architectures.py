"""The architectures that are read: their families, names of tensors, and what differs from Llama.

Source: the tables of gguf-py (gguf/constants.py) and the conversions of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer_gguf._architecture import FIRST_BIAS, Architecture, multiplied
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._mixtures import MIXTRAL, MIXTURES
from interposer_gguf._settings import Settings

_LAYER = "attention.layer_norm_epsilon"


def _capped(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Gemma's fields; the largest models scale scores by the width for each head."""
    heads, width = settings.integer("attention.head_count"), settings.integer("embedding_length")
    blocks, size = settings.integer("block_count"), settings.integer("attention.key_length")
    largest = {"gemma2": 46, "gemma3": 62}[settings.architecture]
    caps = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {
        "query_pre_attn_scalar": width // heads if blocks == largest else size,
        "hidden_activation": "gelu_pytorch_tanh",
        **{name: settings.number(key) if key in settings else None for name, key in caps.items()},
    }


def _biased_queries(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {"attention_bias": FIRST_BIAS in file.tensors}


def _gelu(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": FIRST_BIAS in file.tensors}


def _exaone(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return that there are no windows where the file states none; the family has a default."""
    stated = settings.integer("attention.sliding_window", 0)
    return {} if stated else {"sliding_window": None}


def _phi(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the original context; the two sets of factors are tensors of the file."""
    key = "rope.scaling.original_context_length"
    return {"original_max_position_embeddings": settings.integer(key)} if key in settings else {}


_AROUND = {"post_attention_norm": "post_attention_layernorm"}
_BEHIND = {**_AROUND, "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_GLM = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_OUTER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA, norm_offset=1.0, fields=_capped),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA, norm_offset=1.0, fields=_capped),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        epsilon=(_LAYER, "layer_norm_eps"),
        fields=lambda settings, file: {"logit_scale": settings.number("logit_scale")},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _BEHIND),
    "granite": Architecture("GraniteForCausalLM", permuted=True, fields=multiplied),
    "glm4": Architecture("Glm4ForCausalLM", _GLM, fields=_biased_queries),
    "exaone4": Architecture("Exaone4ForCausalLM", _BEHIND, fields=_exaone),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(_LAYER, "norm_epsilon"),
        fields=_gelu,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_OUTER,
        "transformer.h",
        transposed=True,
        epsilon=(_LAYER, "layer_norm_epsilon"),
        fields=lambda settings, file: {"hidden_act": "gelu_new"},
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", _PHI, fields=_phi),
    **MIXTURES,
}
"""By the values of ``general.architecture``."""


def architecture_of(settings: Settings) -> Architecture:
    """Return the architecture of a file; ``llama`` with experts is Mixtral.

    Raises: KeyError: it is none of ``ARCHITECTURES``.
    """
    if settings.architecture == "llama" and settings.integer("expert_count", 0):
        return MIXTRAL
    return ARCHITECTURES[settings.architecture]
