"""Supported fields of the ``quantization_config`` that the compressed-tensors library writes.

Field names, defaults and the order in which targets match follow compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization._compressed_tensors.arguments import (
    CacheArguments,
    InputArguments,
    WeightArguments,
)
from interposer_quantization._compressed_tensors.stored import FORMATS, Stored, unsupported_reason
from interposer_quantization._settings_model import SettingsModel, check_regex

_SUPPORTED = f"""\
Supported: the formats {", ".join(map(repr, FORMATS))}, alone or several as 'mixed-precision'; \
integer weights of 1 to 8 bits, floats of 8 and of 4; inputs of 8 bits, or as their weights; a \
cache of 8 bits, symmetric, with one scale or one per kv head; nothing quantized but linear layers.
Try: quantize the original model that way"""

_REGEX = "re:"
# Class names that match every linear layer: ``nn.Linear`` and its base class.
_CLASSES = frozenset({"Linear", "Module"})
_MIXED = "mixed-precision"


def _pattern(text: str) -> str:
    if text.startswith(_REGEX):
        check_regex(text.removeprefix(_REGEX))
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A layer's full name, its class name, or ``re:`` and a regular expression for a name's start."""

Format = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
]
Empty = Annotated[dict[str, Any], Field(max_length=0)]


class DenseSparsity(SettingsModel):
    """The ``sparsity_config`` of early releases, which must declare all weights dense."""

    format: Literal["dense"]
    global_sparsity: float | None = None
    sparsity_structure: str | None = None
    ignore: list[str] | None = None
    targets: list[str] | None = None
    registry_requires_subclass: bool = False


class Group(SettingsModel):
    """A group of layers with the same quantization, or with none."""

    targets: list[Pattern]
    weights: WeightArguments | None = None
    input_activations: InputArguments | None = None
    output_activations: None = None
    format: Literal[Format, "dense"] | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Group:
        if self.weights is None and self.input_activations is not None:
            raise ValueError("input_activations are quantized, but weights are not")
        if self.weights is not None and self.format == "dense":
            raise ValueError("format 'dense' stores no quantized weights")
        return self

    def stored(self, form: str) -> Stored | None:
        """Return the storage format of the group's layers, or None if unquantized.

        Args:
            form: the checkpoint's format, for groups that state none.
        """
        if self.weights is None:
            return None
        inputs = None if self.input_activations is None else self.input_activations.read()
        return Stored(self.format or form, self.weights.read(), inputs)


class Settings(SettingsModel):
    """All fields of ``quantization_config``."""

    quant_method: Literal["compressed-tensors"] = "compressed-tensors"
    config_groups: Annotated[dict[str, Group], Field(min_length=1)]
    format: Literal[Format, "mixed-precision"]
    # Early releases write "frozen" for compressed weights.
    quantization_status: Literal["compressed", "frozen"]
    ignore: list[Pattern] | None = None
    kv_cache_scheme: CacheArguments | None = None
    sparsity_config: Empty | DenseSparsity | None = None
    moe_sparsity_config: None = None
    transform_config: Empty | None = None
    global_compression_ratio: float | None = None
    version: str | None = None
    # Tells transformers how to run the layers; the stored tensors are the same.
    run_compressed: Literal[True] | None = None
    use_optimized_inference: bool | None = None
    # Accepted only with the value that has no effect.
    dequantize: Literal[False] | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Settings:
        """Validate the raw settings and return the parsed settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise _config_error(error) from error

    @model_validator(mode="after")
    def _readable(self) -> Settings:
        problems = []
        for name, group in self.config_groups.items():
            # All groups are checked, for an error that names every unsupported one.
            stored = group.stored(self.format)
            if stored is None:
                continue
            problem = unsupported_reason(stored)
            if stored.form == _MIXED:
                problem = f"the format is {_MIXED!r}, but the group states none of its own"
            if problem is not None:
                problems.append(f"config_groups.{name}: {problem}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def stored(self, name: str) -> Stored | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized.

        A full name takes precedence over a pattern, and a pattern over a class name; ties go to the
        alphabetically first target.
        """
        if any(_precedence(pattern, name) is not None for pattern in self.ignore or ()):
            return None
        # Keyed by (precedence, target), so that min() also settles ties by name.
        matching = {
            (precedence, target): group
            for group in self.config_groups.values()
            for target in group.targets
            if (precedence := _precedence(target, name)) is not None
        }
        return matching[min(matching)].stored(self.format) if matching else None


# Known fields by the last part of an error's location.
_FIELDS = {
    "weights": WeightArguments.model_fields,
    "input_activations": InputArguments.model_fields,
    "kv_cache_scheme": CacheArguments.model_fields,
    "DenseSparsity": DenseSparsity.model_fields,
}


def _precedence(pattern: str, name: str) -> int | None:
    """Return the precedence of the match (0 is highest), or None if ``pattern`` does not match."""
    if pattern == name:
        return 0
    if pattern.startswith(_REGEX):
        return 1 if re.match(pattern.removeprefix(_REGEX), name) else None
    return 2 if pattern in _CLASSES else None


def _config_error(error: ValidationError) -> ConfigError:
    problems = []
    for problem in error.errors():
        *parents, last = ("quantization_config", *map(str, problem["loc"]))
        parent = ".".join(parents)
        if problem["type"] == "extra_forbidden":
            fallback = Settings.model_fields if len(parents) == 1 else Group.model_fields
            known_fields = _FIELDS.get(parents[-1], fallback)
            return UnknownNameError("setting", last, known_fields, _SUPPORTED, f"in {parent}")
        reason = problem["msg"].removeprefix("Value error, ")
        if not parents:
            problems.append(f"  {last}: {reason}")
            continue
        value = "missing" if problem["type"] == "missing" else shortened(problem["input"])
        problems.append(f"  {parent}.{last} = {value}: {reason}")
    listed = "\n".join(problems)
    return ConfigError(
        f"The quantization of this checkpoint is not supported:\n{listed}\n{_SUPPORTED}"
    )
