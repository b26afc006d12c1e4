"""Names of tensors in GGUF files and in Hugging Face checkpoints.

Source: the table of names of gguf-py (gguf/constants.py) for these architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from interposer_gguf._architecture import Architecture

ROPE_FACTORS = "rope_freqs.weight"
"""Factors by which the wavelengths of a rotary embedding are stretched."""

LONG_FACTORS: Mapping[str, str] = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""The same of contexts up to the original one, and of longer ones."""

QUERY_AND_KEY: Mapping[str, str] = {
    "self_attn.q_proj": "num_attention_heads",
    "self_attn.k_proj": "num_key_value_heads",
    "mixer.q_proj": "num_attention_heads",
    "mixer.k_proj": "num_key_value_heads",
}
"""Modules whose outputs are stored in another order, with the field that counts their heads."""

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
    """Return the name of a tensor in Hugging Face checkpoints, or None of one that is not known.

    With ``{}`` in it, it is the name of one expert's part of the tensor.
    """
    found = _BLOCK.fullmatch(name)
    if found is None:
        return _whole(name, architecture.outer, _OUTER)
    whole = _whole(found[2], architecture.inner, _INNER)
    return None if whole is None else f"{architecture.blocks}.{found[1]}.{whole}"


def _whole(name: str, own: Mapping[str, str], usual: Mapping[str, str]) -> str | None:
    """Return what tables have for a name, or for the module that it is a weight or bias of."""
    stem, _, kind = name.rpartition(".")
    if name in own:
        return own[name]
    module = own.get(stem, usual.get(stem))
    return f"{module}.{kind}" if module is not None and kind in ("weight", "bias") else None


def block_of(name: str) -> int | None:
    """Return the number of the decoder block that a tensor of a GGUF file belongs to, if any."""
    found = _BLOCK.fullmatch(name)
    return int(found[1]) if found else None


def part_of(name: str) -> str:
    """Return the name of a tensor of a GGUF file without the block that it belongs to."""
    found = _BLOCK.fullmatch(name)
    return found[2] if found else name
