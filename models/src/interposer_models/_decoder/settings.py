"""The settings of a decoder, read from a checkpoint's config.json and validated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from interposer import ModelFamily
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_models._decoder.field_error import UNKNOWN_MEND, FieldError
from interposer_models._decoder.rotary_fields import (
    LAYER_TYPES,
    LIFTED,
    LayerTypeBases,
    long_factors_note,
    one_rotation,
    rotation_by_layer_type,
)
from interposer_ops.rotary import rotary_frequencies

# Far above any model, and small enough that the product of two such sizes fits a tensor.
Positive = Annotated[int, Field(gt=0, le=2**24)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
RopeBase = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
WindowTokens = Annotated[int, Field(gt=0, lt=2**31)]


class FrameNames(NamedTuple):
    """The names that a checkpoint gives to the modules of a decoder outside of the blocks.

    Attributes:
        positions: the table of learned positions, which replaces rotary angles; empty if there is
            none.
        first_position: the row of that table for the first token.
    """

    decoder: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    layers: str = "layers"
    positions: str = ""
    first_position: int = 0


class DecoderSettings(BaseModel, ModelFamily):
    """The fields of config.json that shape a decoder, by Hugging Face name.

    Unknown fields are ignored; a null field gets the default. Properties derive further values.

    Attributes:
        is_rotated: queries and keys are rotated, unless the decoder has a table of positions.
        layer_type_bases: set if sliding-window layers have other angles than full layers.
        reads_layer_types: the architecture reads ``layer_types``; otherwise a field that differs
            from ``slides`` is refused.
        switches_windows: windows apply only if ``use_sliding_window`` is true.
        reads_partial_rotary_factor: the same as ``reads_layer_types``, for that field.
    """

    frame: ClassVar[FrameNames] = FrameNames()
    is_rotated: ClassVar[bool] = True
    layer_type_bases: ClassVar[LayerTypeBases | None] = None
    reads_layer_types: ClassVar[bool] = False
    switches_windows: ClassVar[bool] = False
    reads_partial_rotary_factor: ClassVar[bool] = False
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("rope_parameters", "rope_scaling")
    )
    rope_theta: RopeBase = 10000.0
    partial_rotary_factor: Share = 1.0
    original_max_position_embeddings: Positive | None = None
    sliding_window: WindowTokens | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    dtype: str = Field(default="float32", validation_alias=AliasChoices("dtype", "torch_dtype"))
    quantization_config: dict[str, Any] | None = None

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Rotated elements of each head."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def embedding_scale(self) -> float:
        """The factor that embeddings are multiplied by."""
        return 1.0

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """``rope_type`` and its parameters."""
        original = self.original_max_position_embeddings
        length = {} if original is None else {"original_max_position_embeddings": original}
        return {**self._lengths, **self.rope_parameters, **length}

    @property
    def _lengths(self) -> dict[str, Any]:
        """Default context lengths of the rotary scaling, which ``rope_parameters`` may override."""
        # In a YaRN config without it, max_position_embeddings is the original length.
        longest = self.max_position_embeddings
        return {"original_max_position_embeddings": longest, "max_position_embeddings": longest}

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return rotary base and scaling of layer ``index``.

        ``rope_parameters`` may be nested by the names of layer types.
        """
        kind = "full_attention" if self.windows[index] is None else "sliding_attention"
        parameters = self.rope_parameters.get(kind)
        if not isinstance(parameters, dict):
            return self.rope_theta, self.rope_scaling
        return parameters.get("rope_theta", self.rope_theta), {**self._lengths, **parameters}

    def rotation_notes(self) -> list[str]:
        """Return notes for the user about the rotary embedding."""
        rotations = (self.rotation(index) for index in range(self.num_hidden_layers))
        notes = [long_factors_note(scaling) for _, scaling in rotations]
        return [note for note in dict.fromkeys(notes) if note]

    def rotary_size_at(self, index: int) -> int:
        """Return the number of rotated elements of a head in layer ``index``."""
        return self.rotary_size

    def renamed(self, name: str) -> str | None:
        """Map the name of a checkpoint's tensor to this model's; None for an unused tensor."""
        return name

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a sliding window if ``layer_types`` is not stated."""
        return False

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer in tokens; None for a layer with full attention."""
        sliding = [self.slides(index) for index in range(self.num_hidden_layers)]
        if self.layer_types is not None:
            sliding = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(self.sliding_window if has_window else None for has_window in sliding)

    @model_validator(mode="before")
    @classmethod
    def _stated(cls, fields: Any) -> Any:
        """Drop null fields that have a non-null default; merge the rotary fields."""
        # A null stands for the default, unless null itself is a value of the field.
        nullable = {n for n, f in cls.model_fields.items() if type(None) in get_args(f.annotation)}
        present = {n: v for n, v in fields.items() if v is not None or n in nullable}
        spellings = [n for n in ("rope_parameters", "rope_scaling") if n in fields]
        if all(isinstance(fields[n], dict | None) for n in spellings):
            rope = cls.merged_rotation(present)
            present.pop("rope_scaling", None)
            if rope or "rope_parameters" in fields:  # a null one says that there is none
                present["rope_parameters"] = rope
            # rope_parameters overrides fields at the top level, as in transformers.
            present |= {n: rope[n] for n in LIFTED if n in rope}
        return present

    @classmethod
    def merged_rotation(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Merge ``rope_parameters`` and ``rope_scaling`` of config.json.

        Raises: FieldError: the two contradict each other, or one is not read.
        """
        if cls.layer_type_bases is not None:
            return rotation_by_layer_type(fields, cls.layer_type_bases)
        return one_rotation(
            fields, {n: _value_or_default(cls.model_fields[n], n, fields) for n in LIFTED}
        )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        heads, kv_heads, types = self.num_attention_heads, self.num_kv_heads, self.layer_types
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        for kind in (k for k, value in self.rope_parameters.items() if isinstance(value, dict)):
            base = self.rope_parameters[kind].get("rope_theta", self.rope_theta)
            if kind not in LAYER_TYPES:
                raise ValueError(f"rope_parameters of layer type {kind!r} are not supported")
            if type(base) not in (int, float) or base <= 1:
                raise ValueError(f"rope_theta of {kind} is {base!r}, must be above 1")
            self._check_share(kind)
        # A corrupt config must fail here, not by allocating an absurd weight.
        if heads * self.head_size > 2**24:
            raise ValueError(f"{heads} heads of {self.head_size} are more than a model can have")
        # Rotary embedding rotates pairs of elements.
        if self.rotary_size <= 0 or self.rotary_size % 2:
            raise ValueError(
                f"the rotated part of a head is {self.rotary_size}, must be positive and even"
            )
        if types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(types)} of {self.num_hidden_layers} layers")
        if types is not None and "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers, but sliding_window is missing")
        windows_are_on = getattr(self, "use_sliding_window", True) or not self.switches_windows
        if types is not None and "sliding_attention" in types and not windows_are_on:
            raise FieldError(
                "layer_types has sliding layers, but use_sliding_window is false",
                "set it to true, or make these layers full_attention",
            )
        self._check_ignored()
        return self

    def _check_ignored(self) -> None:
        """Refuse fields that would change the result, but that this architecture does not read."""
        layer_types = ["full_attention", "sliding_attention"]
        sliding = [self.slides(index) for index in range(self.num_hidden_layers)]
        has_size = self.sliding_window is not None
        default_types = tuple(layer_types[has_window and has_size] for has_window in sliding)
        # A field that repeats the architecture's layer types is harmless.
        if self.layer_types not in (None, default_types) and not self.reads_layer_types:
            raise FieldError(
                "layer_types is stated, and this architecture does not read it; its layers are "
                f"{', '.join(default_types)}",
                "remove the field, or correct the architecture",
            )
        default = type(self).model_fields["partial_rotary_factor"].default
        if self.partial_rotary_factor != default and not self.reads_partial_rotary_factor:
            raise FieldError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, and this architecture "
                "does not read it",
                "remove the field, or correct the architecture",
            )

    def _check_share(self, kind: str) -> None:
        """Refuse a ``partial_rotary_factor`` of one layer type that differs from the model's."""
        parameters = self.rope_parameters[kind]
        share = parameters.get("partial_rotary_factor", self.partial_rotary_factor)
        # "proportional" is the only type that applies the factor per layer type.
        is_read = parameters.get("rope_type", parameters.get("type")) == "proportional"
        if share != self.partial_rotary_factor and not is_read:
            raise FieldError(
                f"rope_parameters has partial_rotary_factor {share!r} for {kind}, which is not "
                "computed for one type of layers"
            )

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the content of config.json and return the settings.

        Raises: CheckpointError: a field is missing, mistyped or contradictory.
        """
        try:
            parsed = cls.model_validate(config)
            # Compute each layer's frequencies now, so that bad fields fail before weights load.
            for index in range(parsed.num_hidden_layers):
                size, rotation = parsed.rotary_size_at(index), parsed.rotation(index)
                # longrope has two sets of factors; the longest position chooses which is checked.
                for longest in (None, parsed.max_position_embeddings):
                    rotary_frequencies(size, *rotation, longest)
            return parsed
        # An unknown rope_type: name the field that contains it.
        except UnknownNameError as error:
            spellings = ("rope_parameters", "rope_scaling")
            stated_spellings = [n for n in spellings if error.name in str(config.get(n))]
            where = f"in {(stated_spellings or spellings)[0]} of {source}"
            raise UnknownNameError(
                error.kind, error.name, error.known, UNKNOWN_MEND, where
            ) from error
        except ConfigError as error:
            raise CheckpointError(source, f"rope_parameters: {error}", "mend the field") from error
        except ValidationError as error:
            first = error.errors()[0]
            if isinstance(refused := first.get("ctx", {}).get("error"), FieldError):
                raise CheckpointError(source, str(refused), refused.mend) from error
            field_path = ".".join(str(part) for part in first["loc"])
            value = (
                f" (got {first['input']!r})" if field_path and first["type"] != "missing" else ""
            )
            reason = f"{field_path or 'config'}: {first['msg']}{value}"
            raise CheckpointError(source, reason, "mend the field") from error


def _value_or_default(field: FieldInfo, name: str, fields: Mapping[str, Any]) -> Any:
    """Return the value of a field under any of its names, or the default."""
    alias = field.validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
    return next((fields[n] for n in names if isinstance(n, str) and n in fields), field.default)
