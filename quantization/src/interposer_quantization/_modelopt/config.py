"""Supported fields of ModelOpt's quantization settings.

The settings are in ``quantization_config`` of config.json, in hf_quant_config.json, or in both. The
``quantization`` object of hf_quant_config.json becomes the field ``quantization`` of the settings.

Source: the files that ``export_hf_checkpoint`` of NVIDIA ModelOpt 0.47 writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from reprlib import repr as shortened
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from interposer_quantization._settings_model import SettingsModel

Algorithm = Literal[
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_AWQ",
    "W4A16_NVFP4",
    "W8A16",
]
"""Quantization of a layer's weights and of its input."""


def _normalized_algorithm(algorithm: object) -> object:
    """Return the algorithm's name in upper case; ModelOpt writes one name in lower case."""
    return "FP8_PB_WO" if algorithm == "fp8_pb_wo" else algorithm


LayerAlgorithm = Annotated[Algorithm, BeforeValidator(_normalized_algorithm)]
StatedAlgorithm = Annotated[
    Literal[Algorithm, "MIXED_PRECISION"], BeforeValidator(_normalized_algorithm)
]

# Type and bits of a weight, and the group size that the algorithm fixes. None: there are no groups,
# or the settings state the group size.
_NUMBERS: Mapping[Algorithm, tuple[Literal["float", "int"], int, int | None]] = {
    "FP8": ("float", 8, None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("float", 8, None),
    "FP8_PB_WO": ("float", 8, None),
    "MXFP8": ("float", 8, 32),
    "NVFP4": ("float", 4, 16),
    "NVFP4_AWQ": ("float", 4, 16),
    "W4A16_AWQ": ("int", 4, None),
    "W4A16_NVFP4": ("float", 4, 16),
    "W8A16": ("int", 8, None),
}
_OF_ANY_SIZE: Algorithm = "W4A16_AWQ"
_SCALED_INPUTS: Collection[Algorithm] = ("NVFP4_AWQ", "W4A16_AWQ")
_MIXED = "MIXED_PRECISION"
_SUPPORTED = f"""\
Supported: quant_algo {", ".join(_NUMBERS)}, and {_MIXED} of these with 'quantized_layers'; layers \
left out by 'ignore' in config.json, 'exclude_modules' in hf_quant_config.json; a KV cache of FP8 \
or one that is not quantized.
Try: quantize the original model that way"""


@dataclass(frozen=True, slots=True)
class Stored:
    """Quantization algorithm and group size of a layer.

    Attributes:
        group_size: inputs that share a scale; None if the algorithm has no groups.
    """

    algorithm: Algorithm
    group_size: int | None

    def __str__(self) -> str:
        if self.algorithm == _OF_ANY_SIZE:
            return f"{self.algorithm} in groups of {self.group_size}"
        return self.algorithm


class CacheQuantization(SettingsModel):
    """Quantization of the KV cache to FP8, with one scale per layer for keys and one for values."""

    num_bits: Literal[8]
    type: Literal["float"]
    dynamic: Literal[False] = False


class Layer(SettingsModel):
    """Settings of one layer in a model of mixed precision: algorithm and group size."""

    quant_algo: LayerAlgorithm
    group_size: int | None = None
    has_zero_point: Literal[False] | None = None
    pre_quant_scale: bool | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Layer:
        _check_algorithm(self.quant_algo, self.group_size, self.pre_quant_scale)
        if self.group_size is None:
            _check_size_is_stated(self.quant_algo)
        return self

    @property
    def stored(self) -> Stored:
        """Return the algorithm and group size of the layer."""
        return _stored(self.quant_algo, self.group_size)


class Numbers(SettingsModel):
    """Number format of weights or inputs."""

    num_bits: int
    type: Literal["float", "int"]
    group_size: int | None = None
    dynamic: bool | None = None
    strategy: Literal["tensor", "channel", "group"] | None = None


class Group(SettingsModel):
    """A ``config_groups`` entry in the format of compressed-tensors."""

    weights: Numbers
    input_activations: Numbers | None = None
    targets: list[str] = Field(default_factory=list)
    # Redundant with ``quant_algo``.
    has_zero_point: Literal[False] | None = None
    pre_quant_scale: bool | None = None

    def check(self, stored: Stored) -> None:
        """Raise ValueError if the group's weights contradict the format ``stored``."""
        kind, bits, _ = _NUMBERS[stored.algorithm]
        stated_format = (self.weights.type, self.weights.num_bits, self.weights.group_size)
        if stated_format != (kind, bits, stored.group_size):
            raise ValueError(
                f"config_groups has weights of {stated_format[1]} bits ({stated_format[0]}) and "
                f"group_size {stated_format[2]}, but {stored.algorithm} has {bits} ({kind}) and "
                f"{stored.group_size}"
            )


class _Statement(SettingsModel):
    """Fields that both config.json and hf_quant_config.json can state."""

    quant_algo: StatedAlgorithm | None = None
    kv_cache_quant_algo: Literal["FP8"] | None = None
    group_size: int | None = None
    quantized_layers: dict[str, Layer] | None = None
    has_zero_point: Literal[False] | None = None
    pre_quant_scale: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Statement:
        if (self.quant_algo == _MIXED) != bool(self.quantized_layers):
            raise ValueError(
                f"quantized_layers goes with quant_algo {_MIXED!r} and no other, found "
                f"{shortened(self.quantized_layers)} with {self.quant_algo!r}"
            )
        if self.quant_algo is not None and self.quant_algo != "MIXED_PRECISION":
            _check_algorithm(self.quant_algo, self.group_size, self.pre_quant_scale)
        return self


class FileSettings(_Statement):
    """The ``quantization`` object of hf_quant_config.json."""

    quant_algo: StatedAlgorithm
    exclude_modules: list[str] | None = None


class Settings(_Statement):
    """All fields of ``quantization_config``, and the contents of hf_quant_config.json."""

    supported: ClassVar[str] = _SUPPORTED
    without_effect: ClassVar[Collection[str]] = frozenset({"producer"})
    quant_method: Literal["modelopt"] = "modelopt"
    kv_cache_scheme: CacheQuantization | None = None
    ignore: list[str] | None = None
    config_groups: dict[str, Group] | None = None
    quantization: FileSettings | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        # Either file may be missing; if both exist, they must agree.
        file_settings = self.quantization
        if self.quant_algo is None:
            if file_settings is None:
                raise ValueError("neither config.json nor hf_quant_config.json says quant_algo")
            self._check_size(file_settings)
            return self
        if file_settings is not None:
            _check_equal("quant_algo", self.quant_algo, "quant_algo", file_settings.quant_algo)
            layers = self.quantized_layers or {}, file_settings.quantized_layers or {}
            _check_equal("quantized_layers", layers[0], "quantized_layers", layers[1])
            excluded = set(self.ignore or ()), set(file_settings.exclude_modules or ())
            _check_equal("ignore", excluded[0], "exclude_modules", excluded[1])
            caches = self.has_quantized_cache, file_settings.kv_cache_quant_algo is not None
            _check_equal("kv_cache_scheme", caches[0], "kv_cache_quant_algo", caches[1])
            if self.group_size is not None and file_settings.group_size is not None:
                _check_equal("group_size", self.group_size, "group_size", file_settings.group_size)
        self._check_size(self)
        for group in (self.config_groups or {}).values():
            for stored in self._stored_of(group.targets):
                group.check(stored)
        return self

    @property
    def _group_size(self) -> int | None:
        """Return the group size from config.json or, if not stated there, hf_quant_config.json."""
        file_size = None if self.quantization is None else self.quantization.group_size
        return file_size if self.group_size is None else self.group_size

    def _check_size(self, statement: _Statement) -> None:
        if statement.quant_algo not in (None, "MIXED_PRECISION") and self._group_size is None:
            _check_size_is_stated(statement.quant_algo)

    @property
    def has_quantized_cache(self) -> bool:
        """Return whether the KV cache is FP8."""
        if self.quant_algo is None and self.quantization is not None:
            return self.quantization.kv_cache_quant_algo is not None
        return self.kv_cache_scheme is not None or self.kv_cache_quant_algo is not None

    def stored(self, name: str) -> Stored | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized.

        A glob that matches a module excludes all layers inside that module.
        """
        statement = self if self.quant_algo is not None else self.quantization
        assert statement is not None
        excluded = statement.exclude_modules if isinstance(statement, FileSettings) else self.ignore
        # "a.b.c" gives "a", "a.b" and "a.b.c": a glob may match any enclosing module.
        modules = list(accumulate(name.split("."), "{}.{}".format))
        if any(fnmatchcase(module, glob) for module in modules for glob in excluded or ()):
            return None
        if statement.quant_algo == "MIXED_PRECISION":
            # Mixed precision: only listed layers are quantized.
            layer = (statement.quantized_layers or {}).get(name)
            return None if layer is None else layer.stored
        assert statement.quant_algo is not None
        return _stored(statement.quant_algo, self._group_size)

    def _stored_of(self, targets: Collection[str]) -> set[Stored]:
        """Return the distinct algorithms and group sizes of the layers of a group."""
        if self.quant_algo is None or self.quant_algo == "MIXED_PRECISION":
            layers = self.quantized_layers or {}
            return {layer.stored for name, layer in layers.items() if name in targets}
        return {_stored(self.quant_algo, self._group_size)}


def _stored(algorithm: Algorithm, group_size: int | None) -> Stored:
    fixed = _NUMBERS[algorithm][2]
    return Stored(algorithm, group_size if algorithm == _OF_ANY_SIZE else fixed)


def _check_algorithm(algorithm: Algorithm, size: int | None, scaled: bool | None) -> None:
    expected = _NUMBERS[algorithm][2]
    if algorithm == _OF_ANY_SIZE:
        if size is not None and size < 1:
            raise ValueError(f"group_size {size} must be positive")
    elif size is not None and size != expected:
        raise ValueError(f"group_size {size} does not go with {algorithm}, which has {expected}")
    if scaled and algorithm not in _SCALED_INPUTS:
        raise ValueError(
            f"pre_quant_scale does not go with {algorithm}, but with {', '.join(_SCALED_INPUTS)}"
        )


def _check_size_is_stated(algorithm: Algorithm | Literal["MIXED_PRECISION"] | None) -> None:
    if algorithm == _OF_ANY_SIZE:
        raise ValueError(f"{algorithm} needs group_size, which hf_quant_config.json states")


def _check_equal(name: str, value: object, other_name: str, other_value: object) -> None:
    if value != other_value:
        raise ValueError(
            f"{name} {shortened(value)} of config.json contradicts {other_name} "
            f"{shortened(other_value)} of hf_quant_config.json; restore the file that was changed"
        )
