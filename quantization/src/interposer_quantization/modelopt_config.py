"""What ModelOpt says about a checkpoint, as far as it is read.

It stands in ``quantization_config`` of config.json, in hf_quant_config.json beside it, whose part
``quantization`` is found under that name among the settings, or in both.

Source: the files that ``export_hf_checkpoint`` of NVIDIA ModelOpt 0.47 writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from reprlib import repr as shortened
from typing import Any, Literal

from pydantic import Field, model_validator

from interposer_quantization.settings_model import SettingsModel

__all__ = ["Algorithm", "Settings"]

Algorithm = Literal["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8"]
"""How the weights of a layer are stored, and its input is quantized."""

Stated = Literal[Algorithm, "MIXED_PRECISION"]

# Bits of a weight, and how many weights of a row share a scale, where it is fewer than all.
_NUMBERS: Mapping[Algorithm, tuple[int, int | None]] = {
    "FP8": (8, None),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, None),
    "NVFP4": (4, 16),
    "MXFP8": (8, 32),
}
_MIXED = "MIXED_PRECISION"
_SUPPORTED = f"""\
Supported: quant_algo {", ".join(_NUMBERS)}, and {_MIXED} of these with 'quantized_layers'; layers \
left out by 'ignore' in config.json, 'exclude_modules' in hf_quant_config.json; a KV cache of FP8 \
or one that is not quantized.
Try: quantize the original model that way"""


class CacheNumbers(SettingsModel):
    """How keys and values are quantized: to FP8, with one scale each for a layer."""

    num_bits: Literal[8]
    type: Literal["float"]
    dynamic: Literal[False] = False


class Layer(SettingsModel):
    """How one layer is quantized."""

    quant_algo: Algorithm
    group_size: int | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Layer:
        _check_group_size(self.quant_algo, self.group_size)
        return self


class Numbers(SettingsModel):
    """What weights or inputs are rounded to."""

    num_bits: int
    type: Literal["float"]
    group_size: int | None = None
    dynamic: bool | None = None
    strategy: Literal["tensor", "channel", "group"] | None = None


class Group(SettingsModel):
    """The words of compressed-tensors for layers that are quantized alike."""

    weights: Numbers
    input_activations: Numbers
    targets: list[str] = Field(default_factory=list)

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if the weights are others than those of ``algorithm``."""
        found = (self.weights.num_bits, self.weights.group_size)
        if found != _NUMBERS[algorithm]:
            raise ValueError(
                f"config_groups has weights of {found[0]} bits and group_size {found[1]}, but "
                f"{algorithm} has {_NUMBERS[algorithm][0]} and {_NUMBERS[algorithm][1]}"
            )


class _Statement(SettingsModel):
    """What both files say in the same words."""

    quant_algo: Stated | None = None
    kv_cache_quant_algo: Literal["FP8"] | None = None
    group_size: int | None = None
    quantized_layers: dict[str, Layer] | None = None
    has_zero_point: Literal[False] | None = None
    pre_quant_scale: Literal[False] | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Statement:
        if (self.quant_algo == _MIXED) != bool(self.quantized_layers):
            raise ValueError(
                f"quantized_layers goes with quant_algo {_MIXED!r} and no other, found "
                f"{shortened(self.quantized_layers)} with {self.quant_algo!r}"
            )
        if self.quant_algo is not None and self.quant_algo != "MIXED_PRECISION":
            _check_group_size(self.quant_algo, self.group_size)
        return self


class FileSettings(_Statement):
    """The part ``quantization`` of hf_quant_config.json."""

    quant_algo: Stated
    exclude_modules: list[str] | None = None


class Settings(_Statement):
    """The whole ``quantization_config``, and what stands beside it."""

    quant_method: Literal["modelopt"] = "modelopt"
    kv_cache_scheme: CacheNumbers | None = None
    ignore: list[str] | None = None
    config_groups: dict[str, Group] | None = None
    quantization: FileSettings | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Settings:
        """Return the settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        return cls.parsed(settings, {"producer"}, _SUPPORTED)

    @model_validator(mode="after")
    def _agreed(self) -> Settings:
        beside = self.quantization
        if self.quant_algo is None:
            if beside is None:
                raise ValueError("neither config.json nor hf_quant_config.json says quant_algo")
            return self
        if beside is not None:
            _check_alike("quant_algo", self.quant_algo, "quant_algo", beside.quant_algo)
            layers = self.quantized_layers or {}, beside.quantized_layers or {}
            _check_alike("quantized_layers", layers[0], "quantized_layers", layers[1])
            left_out = set(self.ignore or ()), set(beside.exclude_modules or ())
            _check_alike("ignore", left_out[0], "exclude_modules", left_out[1])
            caches = self.has_quantized_cache, beside.kv_cache_quant_algo is not None
            _check_alike("kv_cache_scheme", caches[0], "kv_cache_quant_algo", caches[1])
        for group in (self.config_groups or {}).values():
            for algorithm in self._algorithms(group.targets):
                group.check(algorithm)
        return self

    @property
    def has_quantized_cache(self) -> bool:
        """Say whether keys and values are cached as FP8."""
        if self.quant_algo is None and self.quantization is not None:
            return self.quantization.kv_cache_quant_algo is not None
        return self.kv_cache_scheme is not None or self.kv_cache_quant_algo is not None

    def stored(self, name: str) -> Algorithm | None:
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
            return None if layer is None else layer.quant_algo
        return stated.quant_algo

    def _algorithms(self, targets: Collection[str]) -> set[Algorithm]:
        """Return what the layers of a group are quantized to."""
        if self.quant_algo is None or self.quant_algo == "MIXED_PRECISION":
            layers = self.quantized_layers or {}
            return {layer.quant_algo for name, layer in layers.items() if name in targets}
        return {self.quant_algo}


def _check_group_size(algorithm: Algorithm, size: int | None) -> None:
    expected = _NUMBERS[algorithm][1]
    if size is not None and size != expected:
        raise ValueError(f"group_size {size} does not go with {algorithm}, which has {expected}")


def _check_alike(name: str, here: object, other_name: str, beside: object) -> None:
    if here != beside:
        raise ValueError(
            f"{name} {shortened(here)} of config.json contradicts {other_name} "
            f"{shortened(beside)} of hf_quant_config.json; restore the file that was changed"
        )
