"""From the metadata of a GGUF file to the rotary embedding that a config.json describes."""

from __future__ import annotations

from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._settings import Settings
from interposer_gguf._tensor_names import LONG_FACTORS, ROPE_FACTORS

_LATENT = ("deepseek2", "deepseek32")
# Further numbers of yarn, by their keys and by their fields.
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def head_size_of(settings: Settings) -> int:
    """Return the size of a head, which follows from the width unless it is stated."""
    width, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    return settings.integer("attention.key_length", width // max(heads, 1))


def rotated_of(settings: Settings) -> int:
    """Return how many numbers of a head are rotated."""
    return settings.integer("rope.dimension_count", head_size_of(settings))


def rope_of(file: GGUFFile, settings: Settings, rotated: int) -> dict[str, Any]:
    """Return ``rope_parameters``, of heads of which so many numbers are rotated.

    Raises:
        CheckpointError: factors are of another number, or metadata is missing or mistyped.
        UnsupportedModelError: the angles are of a type that is not read.
    """
    context = settings.integer("context_length")
    factor = _scaling_factor(settings)
    # llama.cpp scales linearly if the file names a factor and no type.
    default_type = "none" if factor in (None, 1.0) else "linear"
    kind = settings.text("rope.scaling.type", default_type)
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModelError(
                file.path, f"has factors of wavelengths besides rope.scaling.type {kind[:50]!r}"
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
        sets = {key: _factors(file, name, rotated) for key, name in LONG_FACTORS.items()}
        magnitude = settings.number("rope.scaling.attn_factor", 1.0)
        return {"rope_type": "longrope", **sets, "attention_factor": magnitude}
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            file.path, f"has rope.scaling.type {kind[:50]!r}; read are none, linear and yarn"
        )
    if settings.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(file.path, "has rope.scaling.attn_factor other than 1")
    if factor is None:
        factor = settings.number("rope.scaling.factor")
    rope: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = "rope.scaling.original_context_length"
    if original in settings:
        rope["original_max_position_embeddings"] = settings.integer(original)
    if kind == "yarn":
        rope |= {field: settings.number(key) for key, field in _YARN.items() if key in settings}
    if settings.architecture in _LATENT:
        # A tenth of both of DeepSeek's factors, which are equal in all of its models.
        scale = settings.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return rope


def _scaling_factor(settings: Settings) -> float | None:
    """Return the factor by which positions are divided, or None if the file names none.

    ``rope.scale_linear`` is the old key; the new key takes precedence. As in llama.cpp, 0 means 1.
    """
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if key in settings:
            return settings.number(key) or 1.0
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


def layer_types_of(settings: Settings) -> dict[str, Any]:
    """Return ``layer_types`` if the file says which layers have the window.

    Raises: CheckpointError: it says so of other layers than there are.
    """
    key = "attention.sliding_window_pattern"
    if not settings.is_list(key):
        return {}
    count = settings.integer("block_count") - settings.integer("nextn_predict_layers", 0)
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[slides] for slides in settings.of_layers(key, bool, count)]}
