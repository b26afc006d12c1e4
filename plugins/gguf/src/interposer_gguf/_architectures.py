"""The supported architectures: families, tensor names and differences from Llama.

Source: the tables of gguf-py (gguf/constants.py) and the conversions of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import (
    FIRST_BIAS,
    LAYER_EPSILON,
    Architecture,
    granite_multipliers,
)
from interposer_gguf._conversions import BY_HEAD
from interposer_gguf._delta_rules import DELTA_RULES
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._gemma import GEMMA
from interposer_gguf._hybrids import HYBRIDS
from interposer_gguf._latent import LATENT
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._moe import MIXTRAL, MIXTURES
from interposer_gguf._positions import head_size_of, layer_types_of, rope_of, rotated_of
from interposer_gguf._stacked_moe import STACKED


def _biased_queries(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    return {"attention_bias": FIRST_BIAS in file.tensors}


def _gelu(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": FIRST_BIAS in file.tensors}


def _exaone(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the sliding-window fields of EXAONE, off if the file has no window."""
    window = metadata.integer("attention.sliding_window", 0)
    return {} if window else {"sliding_window": None}


def _phi(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return Phi-3's original context length; the RoPE factors are tensors of the file."""
    key = "rope.scaling.original_context_length"
    return {"original_max_position_embeddings": metadata.integer(key)} if key in metadata else {}


def _olmo(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of OLMo 3 if the file has windows; only global layers scale RoPE."""
    if not metadata.integer("attention.sliding_window", 0):
        return {}
    base = metadata.number("rope.freq_base", 10000.0)
    local_base = metadata.number("rope.freq_base_swa", base)
    scaled_rope = rope_of(file, metadata, rotated_of(metadata))
    return {
        "architectures": ["Olmo3ForCausalLM"],
        **layer_types_of(metadata),
        "rope_parameters": {
            "full_attention": {**scaled_rope, "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
    }


def _mistral(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return no extra config fields; refuse queries scaled by position, as in Ministral 3.

    Raises: UnsupportedModelError: the file has such a scale.
    """
    key = "attention.temperature_scale"
    if metadata.number(key, 0.0):
        raise UnsupportedModelError(metadata.path, f"has {key}, which is not supported")
    return {}


def _neox(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of GPT-NeoX, with exact GELU as published."""
    return {
        "partial_rotary_factor": None,  # its config.json has rotary_pct
        "rotary_pct": rotated_of(metadata) / head_size_of(metadata),
        "hidden_act": "gelu",
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _attention_names(attention: str) -> dict[str, str]:
    return {"attn_qkv": f"{attention}.query_key_value", "attn_output": f"{attention}.dense"}


_UNBOUNDED = 2**20  # ALiBi has no table of positions.
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_POST_NORMS = {**_POST_NORM, "post_ffw_norm": "post_feedforward_layernorm"}
# Files of GLM-4 and Phi-3 store gate and up projection as one tensor, named like the up projection.
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
_DENSE_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
# In checkpoints of BLOOM and GPT-NeoX, the rows of query, key and value alternate by head.
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
        fields=lambda metadata, file: {"logit_scale": metadata.number("logit_scale")},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _POST_NORMS, fields=_olmo),
    "granite": Architecture("GraniteForCausalLM", permuted=True, fields=granite_multipliers),
    "glm4": Architecture("Glm4ForCausalLM", _GLM, fields=_biased_queries),
    "exaone4": Architecture("Exaone4ForCausalLM", _POST_NORMS, fields=_exaone),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(LAYER_EPSILON, "norm_epsilon"),
        fields=_gelu,
    ),
    "gpt2": Architecture(
        # The linear layers of GPT-2 store [inputs, outputs] in checkpoints, hence ``transposed``.
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_OUTER,
        "transformer.h",
        transposed=True,
        epsilon=(LAYER_EPSILON, "layer_norm_epsilon"),
        fields=lambda metadata, file: {"hidden_act": "gelu_new"},
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", _PHI, fields=_phi),
    "bloom": Architecture(
        "BloomForCausalLM",
        {**_DENSE_MLP, **_attention_names("self_attention")},
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
        },
        "transformer.h",
        epsilon=(LAYER_EPSILON, "layer_norm_epsilon"),
        fields=lambda metadata, file: {"max_position_embeddings": _UNBOUNDED},
        conversions=_QKV,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {**_DENSE_MLP, **_attention_names("attention")},
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        "gpt_neox.layers",
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        fields=_neox,
        conversions=_QKV,
    ),
    **GEMMA,
    **MIXTURES,
    **STACKED,
    **LATENT,
    **HYBRIDS,
    **DELTA_RULES,
}
"""The supported architectures, by the value of ``general.architecture``."""


def architecture_of(metadata: MetadataReader) -> Architecture:
    """Return the architecture of a file; ``llama`` with experts is Mixtral.

    Raises: KeyError: the architecture is not in ``ARCHITECTURES``.
    """
    if metadata.architecture == "llama" and metadata.integer("expert_count", 0):
        return MIXTRAL
    return ARCHITECTURES[metadata.architecture]
