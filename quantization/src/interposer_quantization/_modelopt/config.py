"""ModelOpt's description of a checkpoint, as far as it is read.

It stands in ``quantization_config`` of config.json, in hf_quant_config.json beside it, whose part
``quantization`` is found under that name among the settings, or in both.

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
"""Storage of a layer's weights, and quantization of its input."""


def _named(algorithm: object) -> object:
    """Return the name of an algorithm; the library writes one of them in small letters."""
    return "FP8_PB_WO" if algorithm == "fp8_pb_wo" else algorithm


OfLayer = Annotated[Algorithm, BeforeValidator(_named)]
Stated = Annotated[Literal[Algorithm, "MIXED_PRECISION"], BeforeValidator(_named)]

# Kind and bits of a weight, and how many weights of a row share a scale, where it is fewer than
# all; None where the settings say so.
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
    """Storage of a layer.

    Attributes:
        group_size: inputs that share a scale; None where the algorithm has no groups.
    """

    algorithm: Algorithm
    group_size: int | None

    def __str__(self) -> str:
        if self.algorithm == _OF_ANY_SIZE:
            return f"{self.algorithm} in groups of {self.group_size}"
        return self.algorithm


class CacheNumbers(SettingsModel):
    """Quantization of keys and values: to FP8, with one scale each for a layer."""

    num_bits: Literal[8]
    type: Literal["float"]
    dynamic: Literal[False] = False


class Layer(SettingsModel):
    """Quantization of one layer."""

    quant_algo: OfLayer
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
        """Return how the layer is stored."""
        return _stored(self.quant_algo, self.group_size)


class Numbers(SettingsModel):
    """Numbers that weights or inputs are rounded to."""

    num_bits: int
    type: Literal["float", "int"]
    group_size: int | None = None
    dynamic: bool | None = None
    strategy: Literal["tensor", "channel", "group"] | None = None


class Group(SettingsModel):
    """The words of compressed-tensors for layers that are quantized alike."""

    weights: Numbers
    input_activations: Numbers | None = None
    targets: list[str] = Field(default_factory=list)
    # They say the same of a group as the statement of the algorithm.
    has_zero_point: Literal[False] | None = None
    pre_quant_scale: bool | None = None

    def check(self, stored: Stored) -> None:
        """Raise ValueError if the weights are others than those that are stored so."""
        kind, bits, _ = _NUMBERS[stored.algorithm]
        found = (self.weights.type, self.weights.num_bits, self.weights.group_size)
        if found != (kind, bits, stored.group_size):
            raise ValueError(
                f"config_groups has weights of {found[1]} bits ({found[0]}) and group_size "
                f"{found[2]}, but {stored.algorithm} has {bits} ({kind}) and {stored.group_size}"
            )


class _Statement(SettingsModel):
    """Fields that both files have under the same names."""

    quant_algo: Stated | None = None
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
    """The part ``quantization`` of hf_quant_config.json."""

    quant_algo: Stated
    exclude_modules: list[str] | None = None


class Settings(_Statement):
    """The whole ``quantization_config``, and what stands beside it."""

    supported: ClassVar[str] = _SUPPORTED
    without_effect: ClassVar[Collection[str]] = frozenset({"producer"})
    quant_method: Literal["modelopt"] = "modelopt"
    kv_cache_scheme: CacheNumbers | None = None
    ignore: list[str] | None = None
    config_groups: dict[str, Group] | None = None
    quantization: FileSettings | None = None

    @model_validator(mode="after")
    def _agreed(self) -> Settings:
        beside = self.quantization
        if self.quant_algo is None:
            if beside is None:
                raise ValueError("neither config.json nor hf_quant_config.json says quant_algo")
            self._check_size(beside)
            return self
        if beside is not None:
            _check_alike("quant_algo", self.quant_algo, "quant_algo", beside.quant_algo)
            layers = self.quantized_layers or {}, beside.quantized_layers or {}
            _check_alike("quantized_layers", layers[0], "quantized_layers", layers[1])
            left_out = set(self.ignore or ()), set(beside.exclude_modules or ())
            _check_alike("ignore", left_out[0], "exclude_modules", left_out[1])
            caches = self.has_quantized_cache, beside.kv_cache_quant_algo is not None
            _check_alike("kv_cache_scheme", caches[0], "kv_cache_quant_algo", caches[1])
            if self.group_size is not None and beside.group_size is not None:
                _check_alike("group_size", self.group_size, "group_size", beside.group_size)
        self._check_size(self)
        for group in (self.config_groups or {}).values():
            for stored in self._stored_of(group.targets):
                group.check(stored)
        return self

    @property
    def _group_size(self) -> int | None:
        """Return what either file says; config.json leaves it to the other one at times."""
        beside = None if self.quantization is None else self.quantization.group_size
        return beside if self.group_size is None else self.group_size

    def _check_size(self, stated: _Statement) -> None:
        if stated.quant_algo not in (None, "MIXED_PRECISION") and self._group_size is None:
            _check_size_is_stated(stated.quant_algo)

    @property
    def has_quantized_cache(self) -> bool:
        """Say whether keys and values are cached as FP8."""
        if self.quant_algo is None and self.quantization is not None:
            return self.quantization.kv_cache_quant_algo is not None
        return self.kv_cache_scheme is not None or self.kv_cache_quant_algo is not None

    def stored(self, name: str) -> Stored | None:
        """Return how the linear layer ``name`` is quantized, None if it is not.

        A glob that matches a module leaves out everything in it.
        """
        stated = self if self.quant_algo is not None else self.quantization
        assert stated is not None
        left_out = stated.exclude_modules if isinstance(stated, FileSettings) else self.ignore
        modules = list(accumulate(name.split("."), "{}.{}".format))
        if any(fnmatchcase(module, glob) for module in modules for glob in left_out or ()):
            return None
        if stated.quant_algo == "MIXED_PRECISION":
            layer = (stated.quantized_layers or {}).get(name)
            return None if layer is None else layer.stored
        assert stated.quant_algo is not None
        return _stored(stated.quant_algo, self._group_size)

    def _stored_of(self, targets: Collection[str]) -> set[Stored]:
        """Return how the layers of a group are stored."""
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


def _check_alike(name: str, here: object, other_name: str, beside: object) -> None:
    if here != beside:
        raise ValueError(
            f"{name} {shortened(here)} of config.json contradicts {other_name} "
            f"{shortened(beside)} of hf_quant_config.json; restore the file that was changed"
        )
