"""The settings of a decoder, read and validated from a checkpoint's config.json.

The rotary fields have several spellings. Old configs have ``rope_scaling`` and ``rope_theta``;
transformers 5 writes both into ``rope_parameters``, which some families nest by layer type. All
spellings are merged into ``rope_parameters``, with the precedence of transformers. A config with a
value that transformers would silently drop is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from interposer import ModelFamily
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_ops.rotary import rotary_frequencies

UNKNOWN_MEND = "Try: correct the field, or run the model of transformers by interposer_adapt.adapt"
"""The hint for a value that no layer of this package implements."""


class FieldError(ValueError):
    """A field of config.json whose value is wrong or not supported.

    Attributes:
        mend: the hint to the user, in the imperative.
    """

    def __init__(self, reason: str, mend: str = "correct the field") -> None:
        super().__init__(reason)
        self.mend = mend


_LARGEST_STATE = 2**28

Window = Annotated[int, Field(ge=2, le=8)]
"""Tokens that a convolution reads, the current one included."""


def _number(value: Any) -> Any:
    """Return a number of config.json; transformers writes infinity as ``{"__float__": ...}``."""
    return value.get("__float__") if isinstance(value, dict) else value


_Step = Annotated[float, Field(ge=0, allow_inf_nan=True), BeforeValidator(_number)]
Steps = tuple[_Step, _Step]
"""The smallest and the largest step of a state space."""


def check_state(heads: int, rows: int, columns: int) -> None:
    """Raise ValueError if a layer's recurrent state would be larger than in any known model."""
    if heads * rows * columns > _LARGEST_STATE:
        raise ValueError(
            f"a state of {heads} heads of {rows} x {columns} exceeds the limit of "
            f"{_LARGEST_STATE} elements"
        )


def check_convolution(field: str, activation: str) -> None:
    """Raise ValueError if the activation after a recurrent layer's convolution is not SiLU."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"{field} is {activation!r}, convolutions compute with 'silu'")


FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
# Fields that may be inside of rope_parameters or at the top level of config.json.
LIFTED = ("rope_theta", "partial_rotary_factor")


class LayerTypeBases(NamedTuple):
    """The rotary base of sliding-window layers and that of full-attention layers.

    Attributes:
        full: base of full-attention layers, unless ``rope_theta`` states it.
        sliding: base of sliding-window layers, unless ``sliding_field`` states it.
        sliding_field: name of a field of config.json; empty if there is no such field.
    """

    full: float
    sliding: float
    sliding_field: str = ""


def one_rotation(fields: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the rotary fields of config.json for a family with equal rotary angles in all layers.

    A non-empty ``rope_scaling`` replaces ``rope_parameters``, ``rope_theta`` included.

    Args:
        fields: the fields of config.json.
        base: the value that each of ``LIFTED`` has without ``rope_parameters``.
    Raises: FieldError: the replacement would change a value that only ``rope_parameters`` states.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling")
    if not scaling:
        return dict(parameters)
    if nested := [kind for kind in LAYER_TYPES if kind in parameters]:
        raise FieldError(
            "rope_scaling and rope_parameters are both set, and rope_parameters is nested by "
            f"{', '.join(nested)}",
            "move the content of rope_scaling into rope_parameters, and remove rope_scaling",
        )
    # rope_scaling wins; refuse values that only rope_parameters states and that would be lost.
    for name in LIFTED if parameters else ():
        value = parameters.get(name, base[name])
        if scaling.get(name, base[name]) != value:
            raise FieldError(
                "rope_scaling and rope_parameters are both set, and rope_scaling has priority, but "
                f"{name} {value!r} is in rope_parameters alone; without it, {name} would be "
                f"{scaling.get(name, base[name])!r}",
                "move the content of rope_scaling into rope_parameters, and remove rope_scaling",
            )
    return dict(scaling)


def rotation_by_layer_type(fields: Mapping[str, Any], bases: LayerTypeBases) -> dict[str, Any]:
    """Merge the rotary fields of config.json for a family with rotary angles per layer type.

    ``rope_scaling`` applies to full-attention layers.

    Raises: FieldError: a value is stated where transformers does not look.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    nested = {kind: dict(parameters.get(kind) or {}) for kind in LAYER_TYPES}
    base = fields.get("rope_theta", bases.full)
    if parameters and not any(kind in parameters for kind in LAYER_TYPES):
        _refuse_flat(parameters, base)
    if any(kind in scaling for kind in LAYER_TYPES):
        raise FieldError(
            f"rope_scaling is nested by layer types ({', '.join(scaling)}), and is read flat",
            "name the field rope_parameters",
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise FieldError(
            f"rope_scaling has the type under 'type' ({scaling['type']!r}), which transformers "
            "ignores for this architecture, and with it the scaling",
            "name it 'rope_type'",
        )
    nested[FULL] |= scaling
    full, sliding = nested[FULL], nested[SLIDING]
    if not bases.sliding_field and "rope_theta" not in {**full, **sliding} and base != bases.full:
        raise FieldError(
            f"rope_theta is {base!r} outside of rope_parameters; some releases of transformers "
            f"take it for layers of {SLIDING}, others {bases.sliding!r}",
            f"state rope_theta within {FULL} and within {SLIDING} of rope_parameters",
        )
    # A base inside of a nested entry wins over the fields at the top level.
    full.setdefault("rope_theta", base)
    local = fields.get(bases.sliding_field) if bases.sliding_field else None
    sliding.setdefault("rope_theta", bases.sliding if local is None else local)
    return nested


def nested_rotation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters``, which must be nested by layer type in this family.

    Raises: FieldError: another spelling is used.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling")
    flat = [name for name, value in parameters.items() if not isinstance(value, Mapping)]
    if scaling or flat:
        raise FieldError(
            f"{'rope_scaling' if scaling else 'a flat rope_parameters'} is not read for this "
            "architecture, whose layer types differ in angles",
            f"state the angles within {FULL} and within {SLIDING} of rope_parameters",
        )
    return dict(parameters)


def _refuse_flat(parameters: Mapping[str, Any], base: Any) -> None:
    """Raise FieldError if ``rope_parameters`` without nesting differs from the defaults."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # A flat field that states only defaults is harmless.
    other_fields = parameters.keys() - {"rope_type", "type", "rope_theta"}
    if kind == "default" and parameters.get("rope_theta", base) == base and not other_fields:
        return
    raise FieldError(
        f"rope_parameters is flat (rope_type {kind!r}), but layers of {FULL} and of {SLIDING} "
        "have angles of their own in this architecture; transformers ignores what is not within "
        "one of them",
        f"state the angles within {FULL} and within {SLIDING} of rope_parameters",
    )


def long_factors_note(scaling: Mapping[str, Any]) -> str:
    """Return a note that longrope uses the long factors for all sequence lengths, or ""."""
    if scaling.get("rope_type", scaling.get("type")) != "longrope":
        return ""
    # transformers chooses the factors per sequence; here one table of angles serves all sequences.
    longest = scaling["max_position_embeddings"]
    original = scaling["original_max_position_embeddings"]
    if longest <= original or scaling.get("long_factor") == scaling.get("short_factor"):
        return ""
    return (
        f"longrope: all sequences have the long factors, as max_position_embeddings {longest:,} is "
        f"above the original context; transformers takes the short ones for sequences of up to "
        f"{original:,} tokens. For these, set max_position_embeddings to {original}"
    )


# Far above any model, and small enough that the product of two such sizes fits a tensor.
Positive = Annotated[int, Field(gt=0, le=2**24)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
RopeBase = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
WindowTokens = Annotated[int, Field(gt=0, lt=2**31)]


class FrameNames(NamedTuple):
    """The checkpoint's names for the modules of a decoder outside of its blocks.

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
    """The fields of config.json that define a decoder, under the names of Hugging Face.

    Unknown fields are ignored; a null field gets the default. Properties derive further values.

    Attributes:
        is_rotated: queries and keys are rotated, unless the decoder has a table of positions.
        layer_type_bases: set if sliding-window layers have other angles than full layers.
        reads_layer_types: the architecture reads ``layer_types``; otherwise a field that differs
            from ``slides`` is refused.
        switches_windows: windows apply only if ``use_sliding_window`` is true.
        reads_partial_rotary_factor: the same as ``reads_layer_types``, for that field.
        default_mrope_section: ``mrope_section`` of a config that states none; None for a decoder
            whose tokens have one position each.
        is_mrope_interleaved: neighbouring frequencies follow different coordinates, as in Qwen3-VL;
            otherwise each coordinate has adjacent frequencies, as in Qwen2-VL.
        runs_attend_both_ways: tokens of a run that an encoder computes, such as an image, attend
            to each other in both directions.
    """

    frame: ClassVar[FrameNames] = FrameNames()
    is_rotated: ClassVar[bool] = True
    layer_type_bases: ClassVar[LayerTypeBases | None] = None
    reads_layer_types: ClassVar[bool] = False
    switches_windows: ClassVar[bool] = False
    reads_partial_rotary_factor: ClassVar[bool] = False
    default_mrope_section: ClassVar[tuple[int, int, int] | None] = None
    is_mrope_interleaved: ClassVar[bool] = False
    runs_attend_both_ways: ClassVar[bool] = False
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
    _has_encoder: bool = PrivateAttr(default=False)

    @property
    def has_encoder(self) -> bool:
        """Whether prompts may have runs of tokens whose vectors an encoder computes."""
        return self._has_encoder

    def with_encoder(self) -> Self:
        """Return the same settings for prompts with runs that an encoder computes."""
        settings = self.model_copy()
        settings._has_encoder = True
        return settings

    def is_encoder_tensor(self, name: str) -> bool:
        """Say whether the checkpoint tensor ``name`` belongs to an encoder of images or sounds."""
        return False

    def for_tensors(self, names: Callable[[], Collection[str]]) -> Self:
        """Return the settings for a checkpoint by the names of its tensors, as in the model.

        Args:
            names: reads the names; empty if they are not known.
        """
        return self

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Number of elements of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Number of rotated elements of each head."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return 1.0

    @property
    def mrope_section(self) -> tuple[int, int, int] | None:
        """Numbers of frequencies that follow time, height and width of a token's position (M-RoPE).

        None if each token has one position.
        """
        if self.default_mrope_section is None:
            return None
        time, height, width = self.rope_parameters.get("mrope_section", self.default_mrope_section)
        return time, height, width

    @property
    def mrope_axes(self) -> list[int]:
        """The coordinate that each frequency follows: 0 time, 1 height, 2 width."""
        assert self.mrope_section is not None
        sections = self.mrope_section
        if not self.is_mrope_interleaved:
            return [axis for axis, count in enumerate(sections) for _ in range(count)]
        # Time, height and width take turns until height or width has all of its frequencies.
        axes = [0] * sum(sections)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
        return axes

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The parameters of the rotary scaling, with ``rope_type``."""
        original = self.original_max_position_embeddings
        length = {} if original is None else {"original_max_position_embeddings": original}
        scaling = {**self._lengths, **self.rope_parameters, **length}
        # "mrope" is the older name of plain frequencies with three coordinates.
        if self.mrope_section is not None and _rope_type(scaling) == "mrope":
            scaling["rope_type"] = "default"
        return scaling

    @property
    def _lengths(self) -> dict[str, Any]:
        """Context lengths that rotary scaling uses unless ``rope_parameters`` states others."""
        # In a YaRN config without it, max_position_embeddings is the original length.
        longest = self.max_position_embeddings
        return {"original_max_position_embeddings": longest, "max_position_embeddings": longest}

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return the rotary base and scaling of layer ``index``.

        ``rope_parameters`` may be nested by the names of layer types.
        """
        kind = "full_attention" if self.windows[index] is None else "sliding_attention"
        parameters = self.rope_parameters.get(kind)
        if not isinstance(parameters, dict):
            return self.rope_theta, self.rope_scaling
        return parameters.get("rope_theta", self.rope_theta), {**self._lengths, **parameters}

    def rotation_notes(self) -> list[str]:
        """Return notes for the user about the rotary embedding of the model."""
        rotations = (self.rotation(index) for index in range(self.num_hidden_layers))
        notes = [long_factors_note(scaling) for _, scaling in rotations]
        return [note for note in dict.fromkeys(notes) if note]

    def rotary_size_at(self, index: int) -> int:
        """Return the number of rotated elements per head in layer ``index``."""
        return self.rotary_size

    def renamed(self, name: str) -> str | None:
        """Map the name of a checkpoint tensor to this model's name; None for an unused tensor."""
        return name

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a sliding window if the config has no ``layer_types``."""
        return False

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens; None for a layer with full attention."""
        sliding = [self.slides(index) for index in range(self.num_hidden_layers)]
        if self.layer_types is not None:
            sliding = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(self.sliding_window if has_window else None for has_window in sliding)

    @model_validator(mode="before")
    @classmethod
    def _merge_fields(cls, fields: Any) -> Any:
        """Drop null fields whose default is not null; merge the rotary fields of config.json."""
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
        """Merge ``rope_parameters`` and ``rope_scaling`` of config.json into one dict.

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
            self._check_partial_rotary_factor(kind)
        # A corrupt config must fail here, not by allocating an absurd weight.
        if heads * self.head_size > 2**24:
            raise ValueError(
                f"{heads} heads of {self.head_size} exceed the limit of {2**24} elements"
            )
        # Rotary embedding rotates pairs of elements.
        if self.rotary_size <= 0 or self.rotary_size % 2:
            raise ValueError(
                f"the rotated part of a head is {self.rotary_size}, must be positive and even"
            )
        self._check_mrope_section()
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

    def _check_mrope_section(self) -> None:
        """Refuse sections that do not give each rotary frequency one coordinate."""
        if self.default_mrope_section is None:
            return
        section = self.rope_parameters.get("mrope_section", self.default_mrope_section)
        is_section = isinstance(section, list | tuple) and len(section) == 3
        if not is_section or not all(type(count) is int and count >= 0 for count in section):
            raise ValueError(f"mrope_section is {section!r}, must be three numbers of frequencies")
        if sum(section) != self.rotary_size // 2:
            raise ValueError(
                f"mrope_section {section!r} has {sum(section)} frequencies, a head rotates "
                f"{self.rotary_size // 2}"
            )

    def _check_ignored(self) -> None:
        """Refuse config fields that would change the result, but that the family does not read."""
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

    def _check_partial_rotary_factor(self, kind: str) -> None:
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
        """Validate the content of config.json, and return the settings.

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
            raise CheckpointError(
                source, f"rope_parameters: {error}", "correct the field"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            if isinstance(refused := first.get("ctx", {}).get("error"), FieldError):
                raise CheckpointError(source, str(refused), refused.mend) from error
            field_path = ".".join(str(part) for part in first["loc"])
            value = (
                f" (got {first['input']!r})" if field_path and first["type"] != "missing" else ""
            )
            reason = f"{field_path or 'config'}: {first['msg']}{value}"
            raise CheckpointError(source, reason, "correct the field") from error


def _rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def _value_or_default(field: FieldInfo, name: str, fields: Mapping[str, Any]) -> Any:
    """Return a field of config.json under any of its names, or the field's default."""
    alias = field.validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
    return next((fields[n] for n in names if isinstance(n, str) and n in fields), field.default)
