"""The architectures that are read: their families, names of tensors, and what differs from Llama.

Source: the tables of gguf-py (gguf/constants.py) and the conversions of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import FIRST_BIAS, LAYER_EPSILON, Architecture, multiplied
from interposer_gguf._delta_rules import DELTA_RULES
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._gemma import GEMMA
from interposer_gguf._hybrids import HYBRIDS
from interposer_gguf._latent import LATENT
from interposer_gguf._mixtures import MIXTRAL, MIXTURES
from interposer_gguf._positions import head_size_of, layer_types_of, rope_of, rotated_of
from interposer_gguf._restoration import BY_HEAD
from interposer_gguf._settings import Settings
from interposer_gguf._stacked_mixtures import STACKED


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


def _olmo(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of OLMo 3 where there are windows; long angles are for the other layers."""
    if not settings.integer("attention.sliding_window", 0):
        return {}
    base = settings.number("rope.freq_base", 10000.0)
    local = settings.number("rope.freq_base_swa", base)
    long = rope_of(file, settings, rotated_of(settings))
    return {
        "architectures": ["Olmo3ForCausalLM"],
        **layer_types_of(settings),
        "rope_parameters": {
            "full_attention": {**long, "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _mistral(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return nothing; queries that grow with their position, as Ministral 3 has them, are refused.

    Raises: UnsupportedModelError: the file asks for them.
    """
    key = "attention.temperature_scale"
    if settings.number(key, 0.0):
        raise UnsupportedModelError(settings.path, f"has {key}, which is not computed")
    return {}


def _neox(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return GPT-NeoX's fields; its GELU is exact, as published."""
    return {
        "partial_rotary_factor": None,  # its config.json has rotary_pct
        "rotary_pct": rotated_of(settings) / head_size_of(settings),
        "hidden_act": "gelu",
        "use_parallel_residual": settings.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _named(attention: str) -> dict[str, str]:
    """Return the names of the projections of attention at a module below a block."""
    return {"attn_qkv": f"{attention}.query_key_value", "attn_output": f"{attention}.dense"}


_UNBOUNDED = 2**20  # Positions have no table.
_AROUND = {"post_attention_norm": "post_attention_layernorm"}
_BEHIND = {**_AROUND, "post_ffw_norm": "post_feedforward_layernorm"}
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
_SIDES = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_QKV = {"attn_qkv.weight": BY_HEAD, "attn_qkv.bias": BY_HEAD}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "mistral3": Architecture("MistralForCausalLM", permuted=True, fields=_mistral),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        fields=lambda settings, file: {"logit_scale": settings.number("logit_scale")},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _BEHIND, fields=_olmo),
    "granite": Architecture("GraniteForCausalLM", permuted=True, fields=multiplied),
    "glm4": Architecture("Glm4ForCausalLM", _GLM, fields=_biased_queries),
    "exaone4": Architecture("Exaone4ForCausalLM", _BEHIND, fields=_exaone),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(LAYER_EPSILON, "norm_epsilon"),
        fields=_gelu,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_OUTER,
        "transformer.h",
        transposed=True,
        epsilon=(LAYER_EPSILON, "layer_norm_epsilon"),
        fields=lambda settings, file: {"hidden_act": "gelu_new"},
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", _PHI, fields=_phi),
    "bloom": Architecture(
        "BloomForCausalLM",
        {**_SIDES, **_named("self_attention")},
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
        },
        "transformer.h",
        epsilon=(LAYER_EPSILON, "layer_norm_epsilon"),
        fields=lambda settings, file: {"max_position_embeddings": _UNBOUNDED},
        restored=_QKV,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {**_SIDES, **_named("attention")},
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        "gpt_neox.layers",
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        fields=_neox,
        restored=_QKV,
    ),
    **GEMMA,
    **MIXTURES,
    **STACKED,
    **LATENT,
    **HYBRIDS,
    **DELTA_RULES,
}
"""By the values of ``general.architecture``."""


def architecture_of(settings: Settings) -> Architecture:
    """Return the architecture of a file; ``llama`` with experts is Mixtral.

    Raises: KeyError: it is none of ``ARCHITECTURES``.
    """
    if settings.architecture == "llama" and settings.integer("expert_count", 0):
        return MIXTRAL
    return ARCHITECTURES[settings.architecture]
