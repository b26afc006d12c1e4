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
    "self_attn.q_proj": "head_count",
    "self_attn.k_proj": "head_count_kv",
}
"""Modules whose outputs are stored in another order, with the metadata that counts their heads."""

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
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    outer, inner = {**_OUTER, **architecture.outer}, {**_INNER, **architecture.inner}
    found = _BLOCK.fullmatch(stem)
    if found is None:
        return f"{outer[stem]}.{kind}" if stem in outer else None
    number, part = found.groups()
    whole = inner.get(f"{part}.{kind}")
    if whole is None and part in inner:
        whole = f"{inner[part]}.{kind}"
    return None if whole is None else f"{architecture.blocks}.{number}.{whole}"


def block_of(name: str) -> int | None:
    """Return the number of the decoder block that a tensor of a GGUF file belongs to, if any."""
    found = _BLOCK.fullmatch(name)
    return int(found[1]) if found else None
