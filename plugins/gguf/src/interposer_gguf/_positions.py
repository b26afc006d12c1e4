"""Conversion of a GGUF file's metadata to ``rope_parameters`` of a config.json."""

from __future__ import annotations

from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._tensor_names import LONG_FACTORS, ROPE_FACTORS

_LATENT = ("deepseek2", "deepseek32")
# Optional parameters of YaRN: metadata keys and fields of config.json.
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def head_size_of(metadata: MetadataReader) -> int:
    """Return the head size, by default the hidden size divided by the number of heads."""
    width, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    return metadata.integer("attention.key_length", width // max(heads, 1))


def rotated_of(metadata: MetadataReader) -> int:
    """Return the number of elements of a head that RoPE rotates."""
    return metadata.integer("rope.dimension_count", head_size_of(metadata))


def rope_of(file: GGUFFile, metadata: MetadataReader, rotated: int) -> dict[str, Any]:
    """Return ``rope_parameters`` for heads with ``rotated`` rotated elements.

    Raises:
        CheckpointError: there are too few or too many factors, or metadata is missing or mistyped.
        UnsupportedModelError: the type of RoPE scaling is not supported.
    """
    context = metadata.integer("context_length")
    factor = _scaling_factor(metadata)
    # llama.cpp scales linearly if the file names a factor and no type.
    default_type = "none" if factor in (None, 1.0) else "linear"
    kind = metadata.text("rope.scaling.type", default_type)
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModelError(
                file.path, f"has factors of wavelengths and also rope.scaling.type {kind[:50]!r}"
            )
        factors = _factors(file, ROPE_FACTORS, rotated)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if all(name in file.tensors for name in LONG_FACTORS.values()):
        factors_by_field = {
            key: _factors(file, name, rotated) for key, name in LONG_FACTORS.items()
        }
        magnitude = metadata.number("rope.scaling.attn_factor", 1.0)
        return {"rope_type": "longrope", **factors_by_field, "attention_factor": magnitude}
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            file.path, f"has rope.scaling.type {kind[:50]!r}; supported are none, linear and yarn"
        )
    if metadata.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(file.path, "has rope.scaling.attn_factor other than 1")
    if factor is None:
        factor = metadata.number("rope.scaling.factor")
    rope: dict[str, Any] = {"rope_type": kind, "factor": factor}
    context_key = "rope.scaling.original_context_length"
    if context_key in metadata:
        rope["original_max_position_embeddings"] = metadata.integer(context_key)
    if kind == "yarn":
        rope |= {field: metadata.number(key) for key, field in _YARN.items() if key in metadata}
    if metadata.architecture in _LATENT:
        # The file stores 0.1 * mscale. DeepSeek's two scales are equal in all of its models.
        scale = metadata.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return rope


def _scaling_factor(metadata: MetadataReader) -> float | None:
    """Return the RoPE factor that divides positions, or None if the file has none.

    ``rope.scale_linear`` is the old key; the new key takes precedence. As in llama.cpp, 0 means 1.
    """
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if key in metadata:
            return metadata.number(key) or 1.0
    return None


def _factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    stored = file.tensors[name]
    if stored.in_blocks or stored.shape != (rotated // 2,):
        raise CheckpointError(
            file.path,
            f"stores {name!r} as {stored.stored_as} of the shape {stored.shape}, must be floats of "
            f"the shape {(rotated // 2,)}",
        )
    factors: list[float] = file.read(stored).float().tolist()
    return factors


def layer_types_of(metadata: MetadataReader) -> dict[str, Any]:
    """Return the field ``layer_types`` if the file states which layers have a sliding window.

    Raises: CheckpointError: the file states this for too few layers.
    """
    key = "attention.sliding_window_pattern"
    if not metadata.is_list(key):
        return {}
    count = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[slides] for slides in metadata.per_layer(key, bool, count)]}
