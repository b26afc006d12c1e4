"""The ``quantization_config`` that the compressed-tensors library writes, as far as it is read.

Field names, defaults and the order in which targets match are those of compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from interposer.errors import ConfigError, UnknownNameError

__all__ = ["Settings"]

_SUPPORTED = """\
Supported: weights of type 'int' with 8 bits, symmetric, of strategy 'channel' or 'group'; nothing \
else quantized; format 'int-quantized' or 'naive-quantized'.
Try: quantize the original model that way, and write it with \
ModelCompressor.from_pretrained_model(model, "int-quantized")"""

_REGEX = "re:"
# Classes of the layers that a scheme is asked about: torch's name and its bases'.
_CLASSES = frozenset({"Linear", "Module"})


def _pattern(text: str) -> str:
    if text.startswith(_REGEX):
        try:
            re.compile(text.removeprefix(_REGEX))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A layer's full name, the name of its class, or ``re:`` and what its full name starts with."""

Format = Literal["int-quantized", "naive-quantized"]
Empty = Annotated[dict[str, Any], Field(max_length=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Weights(_Model):
    """How the weights of a group of layers are quantized."""

    num_bits: Literal[8] = 8
    type: Literal["int"] = "int"
    symmetric: Literal[True] = True
    strategy: Literal["channel", "group"] | None = None
    group_size: int | None = None
    dynamic: Literal[False] = False
    actorder: Literal[False] | None = None
    block_structure: None = None
    scale_dtype: Literal["torch.float32", "torch.bfloat16", "torch.float16"] | None = None
    zp_dtype: Literal["torch.int8"] | None = None
    # How the scales were found does not change what is stored.
    observer: str | None = None
    observer_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _coherent(self) -> Weights:
        size = self.group_size
        grouped = size is not None and size > 0
        # Unstated, it follows from the group size; without one, a single scale serves the tensor.
        strategy = self.strategy or ("group" if grouped else "channel" if size == -1 else "tensor")
        if strategy != ("group" if grouped else "channel") or not (grouped or size in (None, -1)):
            raise ValueError(
                f"strategy {strategy!r} does not go with group_size {size!r}; 'group' takes a "
                "positive one, 'channel' null or -1"
            )
        return self

    @property
    def inputs_per_scale(self) -> int | None:
        """Return the group size, or None where one scale holds for a whole output."""
        return self.group_size if self.group_size != -1 else None

    def __str__(self) -> str:
        size = self.inputs_per_scale
        return "int8 per output" if size is None else f"int8 per group of {size} inputs"


class Group(_Model):
    """Layers that are quantized alike."""

    targets: list[Pattern]
    weights: Weights
    input_activations: None = None
    output_activations: None = None
    format: Format | None = None


class Settings(_Model):
    """The whole ``quantization_config``."""

    quant_method: Literal["compressed-tensors"] = "compressed-tensors"
    config_groups: Annotated[dict[str, Group], Field(min_length=1)]
    format: Format
    # Early releases left the status at frozen when they stored compressed weights.
    quantization_status: Literal["compressed", "frozen"]
    ignore: list[Pattern] | None = None
    kv_cache_scheme: None = None
    sparsity_config: Empty | None = None
    moe_sparsity_config: None = None
    transform_config: Empty | None = None
    global_compression_ratio: float | None = None
    version: str | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Settings:
        """Return the settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise _config_error(error) from error

    def weights(self, name: str) -> Weights | None:
        """Return how the linear layer ``name`` is quantized, or None if it is not.

        A full name goes before a pattern and a pattern before a class; among equals the first in
        alphabetical order decides.
        """
        if any(_precedence(pattern, name) is not None for pattern in self.ignore or ()):
            return None
        matching = {
            (precedence, target): group.weights
            for group in self.config_groups.values()
            for target in group.targets
            if (precedence := _precedence(target, name)) is not None
        }
        return matching[min(matching)] if matching else None


# By the number of names that lead to a model: none but the root, a group, its weights.
_FIELDS = {1: Settings.model_fields, 3: Group.model_fields, 4: Weights.model_fields}


def _precedence(pattern: str, name: str) -> int | None:
    """Return the rank of the way in which ``pattern`` matches ``name``, None if it doesn't."""
    if pattern == name:
        return 0
    if pattern.startswith(_REGEX):
        return 1 if re.match(pattern.removeprefix(_REGEX), name) else None
    return 2 if pattern in _CLASSES else None


def _config_error(error: ValidationError) -> ConfigError:
    problems = []
    for problem in error.errors():
        *place, last = ("quantization_config", *map(str, problem["loc"]))
        parent = ".".join(place)
        if problem["type"] == "extra_forbidden":
            known = _FIELDS[len(place)]
            return UnknownNameError("setting", last, known, _SUPPORTED, f"in {parent}")
        found = "missing" if problem["type"] == "missing" else shortened(problem["input"])
        reason = problem["msg"].removeprefix("Value error, ")
        problems.append(f"  {parent}.{last} = {found}: {reason}")
    listed = "\n".join(problems)
    return ConfigError(
        f"The quantization of this checkpoint is not supported:\n{listed}\n{_SUPPORTED}"
    )
