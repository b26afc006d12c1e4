"""Architectures of Gemma 2, 3 and 4.

Source: conversions of llama.cpp, and graphs of llama.cpp for values that the metadata lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import CheckpointError
from interposer_gguf._architecture import Architecture
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._positions import layer_types_of, rope_of, rotated_of
from interposer_gguf._tensor_names import ROPE_FACTORS

_ACTIVATION = "gelu_pytorch_tanh"
_PER_LAYER_TABLE = "per_layer_token_embd.weight"


def _gemma2(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Gemma 2, with softcaps if the file has some.

    The largest models scale attention scores by the width per head, not by the head size.
    """
    heads, width = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    blocks, size = metadata.integer("block_count"), metadata.integer("attention.key_length")
    # The file lacks the scale of attention scores, so recognize the largest model by its depth.
    largest_num_blocks = {"gemma2": 46, "gemma3": 62}[metadata.architecture]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "query_pre_attn_scalar": width // heads if blocks == largest_num_blocks else size,
        "hidden_activation": _ACTIVATION,
        **{name: metadata.number(name) if name in metadata else None for name in caps},
    }


def _gemma3(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Gemma 3; only global attention layers scale RoPE."""
    scaled_rope = rope_of(file, metadata, rotated_of(metadata))
    base, local_base = (
        metadata.number(key, default)
        for key, default in (("rope.freq_base", 1000000.0), ("rope.freq_base_swa", 10000.0))
    )
    return {
        **_gemma2(metadata, file),
        "rope_parameters": {
            "full_attention": {**scaled_rope, "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
    }


def _gemma4(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Gemma 4; heads and MLPs differ between layers."""
    count = metadata.integer("block_count")
    kinds = layer_types_of(metadata).get("layer_types", [])
    is_sliding = [kind == "sliding_attention" for kind in kinds]
    if not is_sliding or len(is_sliding) != count:
        raise CheckpointError(
            metadata.path, "lacks the metadata 'gemma4.attention.sliding_window_pattern'"
        )
    heads = metadata.per_layer("attention.head_count_kv", int, count)
    inner = metadata.per_layer("feed_forward_length", int, count)
    first_global = next((i for i, slid in enumerate(is_sliding) if not slid), None)
    table = file.tensors.get(_PER_LAYER_TABLE)
    cap_key = "final_logit_softcapping"
    return {
        "layer_types": kinds,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_attention_heads": metadata.integer("attention.head_count"),
        # Sliding and global layers differ in their numbers of heads; one layer of each kind tells.
        "num_key_value_heads": heads[is_sliding.index(True)] if any(is_sliding) else heads[0],
        "num_global_key_value_heads": None if first_global is None else heads[first_global],
        "head_dim": metadata.integer("attention.key_length_swa"),
        "global_head_dim": metadata.integer("attention.key_length"),
        # Without a value projection, the keys are also the values.
        "attention_k_eq_v": first_global is not None
        and f"blk.{first_global}.attn_v.weight" not in file.tensors,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        **({"vocab_size_per_layer_input": table.shape[0]} if table else {}),
        "hidden_activation": _ACTIVATION,
        "final_logit_softcapping": metadata.number(cap_key) if cap_key in metadata else None,
        "rope_parameters": {
            "full_attention": _proportional(metadata, file),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _proportional(metadata: MetadataReader, file: GGUFFile) -> dict[str, Any]:
    """Return the RoPE parameters of global layers, which rotate a part of each head only.

    The file has a factor per pair: 1 for rotated pairs, and a factor so large that the pair hardly
    rotates for all other pairs.
    """
    size = metadata.integer("attention.key_length")
    stored = file.tensors.get(ROPE_FACTORS)
    if stored is None or stored.in_blocks or stored.shape != (size // 2,):
        raise CheckpointError(file.path, f"lacks the tensor {ROPE_FACTORS!r} of {size // 2} floats")
    rotated = int((file.read(stored).float() == 1).sum())
    return {
        "rope_type": "proportional",
        "rope_theta": metadata.number("rope.freq_base", 1000000.0),
        "partial_rotary_factor": 2 * rotated / size,
    }


_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_INNER = {
    **_NORMS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}

GEMMA: Mapping[str, Architecture] = {
    "gemma2": Architecture("Gemma2ForCausalLM", _NORMS, norm_offset=1.0, fields=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", _NORMS, norm_offset=1.0, fields=_gemma3),
    "gemma4": Architecture("Gemma4ForCausalLM", _INNER, _OUTER, fields=_gemma4, is_uniform=False),
}
"""By the values of ``general.architecture``."""
