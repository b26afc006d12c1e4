"""Translation of tensor names from GGUF files to Hugging Face checkpoints.

Source: the tables of names of gguf-py (gguf/constants.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from interposer_gguf._architecture import Architecture

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of factors by which wavelengths of RoPE are stretched."""

LONG_FACTORS: Mapping[str, str] = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""The tensors of LongRoPE factors for short and long contexts, by field of config.json."""

QUERY_AND_KEY: Mapping[str, str] = {
    "self_attn.q_proj": "num_attention_heads",
    "self_attn.k_proj": "num_key_value_heads",
    "mixer.q_proj": "num_attention_heads",
    "mixer.k_proj": "num_key_value_heads",
}
"""Modules whose rows are permuted in files of Llama, with the field of their number of heads."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)", re.ASCII)


def hugging_face_name(name: str, architecture: Architecture) -> str | None:
    """Return the Hugging Face name of a tensor, None if unknown.

    A name with ``{}`` is that of one expert's matrix in the tensor.
    """
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _translate(name, architecture.outer_modules, _OUTER)
    tensor_name = _translate(match[2], architecture.block_modules, _INNER)
    return None if tensor_name is None else f"{architecture.block_prefix}.{match[1]}.{tensor_name}"


def _translate(
    name: str, special_names: Mapping[str, str], common_names: Mapping[str, str]
) -> str | None:
    """Translate the GGUF name of a tensor, or of a module's weight or bias."""
    stem, _, kind = name.rpartition(".")
    if name in special_names:
        return special_names[name]
    module = special_names.get(stem, common_names.get(stem))
    return f"{module}.{kind}" if module is not None and kind in ("weight", "bias") else None


def block_of(name: str) -> int | None:
    """Return the number of the decoder block of a tensor in a GGUF file, None outside of blocks."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def part_of(name: str) -> str:
    """Return the name of a tensor in a GGUF file without the prefix of the block."""
    match = _BLOCK.fullmatch(name)
    return match[2] if match else name
