"""What a decoder needs to know of a checkpoint's config.json, checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from interposer.errors import CheckpointError, UnsupportedModelError, nearest_first

__all__ = ["ARCHITECTURES", "DecoderConfig", "Traits"]

Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Traits:
    """How one architecture differs from the parametric decoder's defaults.

    Attributes:
        qkv_bias: the Q, K and V projections have a bias; None asks the config's attention_bias.
        qk_norm: queries and keys are normalised per head.
        windowed: layers slide unless ``use_sliding_window`` or ``layer_types`` say otherwise.
        head_size: where the config doesn't say; None derives it from the hidden size.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    windowed: bool = False
    head_size: int | None = None


ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(windowed=True),
    "Qwen2ForCausalLM": Traits(qkv_bias=True),
    "Qwen3ForCausalLM": Traits(qk_norm=True, head_size=128),
}


class DecoderConfig(BaseModel):
    """The fields of config.json that shape a decoder, by their Hugging Face names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    architecture: str
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    windows: tuple[int | None, ...]
    dtype: str = "float32"
    quantization_config: dict[str, Any] | None = None

    @property
    def traits(self) -> Traits:
        """Return what is special about the architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def qkv_bias(self) -> bool:
        """Say whether the Q, K and V projections have a bias."""
        fixed = self.traits.qkv_bias
        return self.attention_bias if fixed is None else fixed

    @property
    def rotary_size(self) -> int:
        """Return how many elements of each head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @model_validator(mode="after")
    def _coherent(self) -> DecoderConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rotary_size % 2:
            raise ValueError(f"the rotated part of a head is {self.rotary_size}, must be even")
        return self

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: object) -> DecoderConfig:
        """Return the config that the contents of config.json describe.

        Raises:
            UnsupportedModelError: the architecture is not among ``ARCHITECTURES``.
            CheckpointError: a field is missing, mistyped or contradictory.
        """
        architecture = _architecture(raw, path)
        fields = {name: value for name, value in raw.items() if value is not None}
        traits = ARCHITECTURES[architecture]
        try:
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
            derived = fields["hidden_size"] // fields["num_attention_heads"]
            fields.setdefault("head_dim", traits.head_size or derived)
            rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
            fields["rope_theta"] = rope.pop("rope_theta", fields.get("rope_theta", 10000.0))
            fields["partial_rotary_factor"] = rope.pop(
                "partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)
            )
            fields["rope_scaling"] = _scaling(rope, fields)
            fields["windows"] = _windows(fields, traits)
            fields["dtype"] = str(fields.get("dtype", fields.get("torch_dtype", "float32")))
            return cls(**{**fields, "architecture": architecture})
        except KeyError as error:
            raise CheckpointError(path, f"the field {error} is missing") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "config"
            raise CheckpointError(
                path, f"{place}: {first['msg']} (got {first['input']!r})"
            ) from error
        except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise CheckpointError(path, f"a field has the wrong type: {error}") from error


def _architecture(raw: Mapping[str, Any], path: object) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(path, "the field 'architectures' is missing, so the model is unknown")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    listed = ", ".join(nearest_first(str(names[0]), ARCHITECTURES))
    raise UnsupportedModelError(
        path, f"architecture {names[0]!r} is not supported; supported are {listed}"
    )


def _scaling(rope: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "yarn":
        # A yarn config without it means that max_position_embeddings is the original length.
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return rope


def _windows(fields: Mapping[str, Any], traits: Traits) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, None where a layer sees everything."""
    num_layers = int(fields["num_hidden_layers"])
    window = fields.get("sliding_window")
    types = fields.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != num_layers:
            raise ValueError(f"layer_types {types!r} does not describe {num_layers} known layers")
        if "sliding_attention" in types and window is None:
            raise ValueError("layer_types has sliding layers, but sliding_window is missing")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if window is None or not fields.get("use_sliding_window", traits.windowed):
        return (None,) * num_layers
    first = int(fields.get("max_window_layers", 0)) if "use_sliding_window" in fields else 0
    return tuple(window if index >= first else None for index in range(num_layers))
