"""The architectures of Gemma.

Source: the conversions of llama.cpp and its graphs, which say what the metadata leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import CheckpointError
from interposer_gguf._architecture import Architecture
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._positions import layer_types_of, rope_of, rotated_of
from interposer_gguf._settings import Settings
from interposer_gguf._tensor_names import ROPE_FACTORS

_ACTIVATION = "gelu_pytorch_tanh"
_OWN_TABLE = "per_layer_token_embd.weight"


def _capped(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Gemma's fields; the largest models scale scores by the width for each head."""
    heads, width = settings.integer("attention.head_count"), settings.integer("embedding_length")
    blocks, size = settings.integer("block_count"), settings.integer("attention.key_length")
    largest = {"gemma2": 46, "gemma3": 62}[settings.architecture]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "query_pre_attn_scalar": width // heads if blocks == largest else size,
        "hidden_activation": _ACTIVATION,
        **{name: settings.number(name) if name in settings else None for name in caps},
    }


def _gemma3(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Gemma 3's fields; long angles are for layers that see everything."""
    long = rope_of(file, settings, rotated_of(settings))
    base, local = (
        settings.number(key, default)
        for key, default in (("rope.freq_base", 1000000.0), ("rope.freq_base_swa", 10000.0))
    )
    return {
        **_capped(settings, file),
        "rope_parameters": {
            "full_attention": {**long, "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _gemma4(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Gemma 4's fields; heads and MLPs differ between layers."""
    count = settings.integer("block_count")
    kinds = layer_types_of(settings).get("layer_types", [])
    slides = [kind == "sliding_attention" for kind in kinds]
    if not slides or len(slides) != count:
        raise CheckpointError(
            settings.path, "lacks the metadata 'gemma4.attention.sliding_window_pattern'"
        )
    heads = settings.of_layers("attention.head_count_kv", int, count)
    inner = settings.of_layers("feed_forward_length", int, count)
    sees_all = next((i for i, slid in enumerate(slides) if not slid), None)
    table = file.tensors.get(_OWN_TABLE)
    cap = "final_logit_softcapping"
    return {
        "layer_types": kinds,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_attention_heads": settings.integer("attention.head_count"),
        "num_key_value_heads": heads[slides.index(True)] if any(slides) else heads[0],
        "num_global_key_value_heads": None if sees_all is None else heads[sees_all],
        "head_dim": settings.integer("attention.key_length_swa"),
        "global_head_dim": settings.integer("attention.key_length"),
        "attention_k_eq_v": sees_all is not None
        and f"blk.{sees_all}.attn_v.weight" not in file.tensors,
        "sliding_window": settings.integer("attention.sliding_window"),
        "num_kv_shared_layers": settings.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": settings.integer("embedding_length_per_layer_input", 0),
        **({"vocab_size_per_layer_input": table.shape[0]} if table else {}),
        "hidden_activation": _ACTIVATION,
        "final_logit_softcapping": settings.number(cap) if cap in settings else None,
        "rope_parameters": {
            "full_attention": _proportional(settings, file),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _proportional(settings: Settings, file: GGUFFile) -> dict[str, Any]:
    """Return the angles of layers that see everything, a part of whose heads is rotated.

    In files, the wavelengths of the rest are so long that they stay where they are.
    """
    size = settings.integer("attention.key_length")
    stored = file.tensors.get(ROPE_FACTORS)
    if stored is None or stored.in_blocks or stored.shape != (size // 2,):
        raise CheckpointError(file.path, f"lacks the tensor {ROPE_FACTORS!r} of {size // 2} floats")
    rotated = int((file.read(stored).float() == 1).sum())
    return {
        "rope_type": "proportional",
        "rope_theta": settings.number("rope.freq_base", 1000000.0),
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
    "gemma2": Architecture("Gemma2ForCausalLM", _NORMS, norm_offset=1.0, fields=_capped),
    "gemma3": Architecture("Gemma3ForCausalLM", _NORMS, norm_offset=1.0, fields=_gemma3),
    "gemma4": Architecture("Gemma4ForCausalLM", _INNER, _OUTER, fields=_gemma4, regular=False),
}
"""By the values of ``general.architecture``."""
