"""The schemes that a model can be quantized with, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization.writing.float_formats import (
    Fp8Format,
    Mxfp4Format,
    Mxfp8Format,
    Nvfp4Format,
)
from interposer_quantization.writing.integer_formats import IntegerFormat
from interposer_quantization.writing.weight_format import WeightFormat

__all__ = ["SCHEMES", "quantization_config", "weight_format"]

SCHEMES: Mapping[str, str] = {
    "fp8": "8-bit floats, a scale for each output; inputs are rounded per token",
    "int8": "8 bits, a scale for each output; inputs are rounded per token",
    "int4": "4 bits, a scale for each group of inputs",
    "mxfp8": "8-bit floats, a power of two for each 32 inputs; inputs are rounded alike",
    "mxfp4": "4-bit floats, a power of two for each 32 inputs",
    "nvfp4": "4-bit floats, an 8-bit float for each 16 inputs",
}
_INT4_GROUP_SIZE = 128
_FLOATS: Mapping[str, type[WeightFormat]] = {
    "fp8": Fp8Format,
    "mxfp8": Mxfp8Format,
    "mxfp4": Mxfp4Format,
    "nvfp4": Nvfp4Format,
}


def weight_format(
    scheme: str,
    group_size: int | None = None,
    *,
    asymmetric: bool = False,
    weight_only: bool = False,
) -> WeightFormat:
    """Return the format of a scheme.

    Args:
        group_size: of int4, by default 128.
        asymmetric: int4 with a zero point for each group.
        weight_only: int8 without rounding the inputs.
    Raises:
        UnknownNameError: there is no such scheme.
        ConfigError: the scheme leaves no choice in what was asked for.
    """
    if scheme not in SCHEMES:
        raise UnknownNameError("scheme", scheme, SCHEMES)
    if group_size is not None and scheme != "int4":
        raise ConfigError(f"A group size goes with int4 only: {scheme} is {SCHEMES[scheme]}")
    if asymmetric and scheme != "int4":
        raise ConfigError(f"Zero points go with int4 only: {scheme} is {SCHEMES[scheme]}")
    if weight_only and scheme != "int8":
        raise ConfigError(f"Only int8 can be had with or without inputs rounded, not {scheme}")
    if group_size is not None and group_size < 1:
        raise ConfigError(f"The group size is {group_size}, must be positive")
    if scheme == "int4":
        return IntegerFormat(4, group_size or _INT4_GROUP_SIZE, symmetric=not asymmetric)
    if scheme == "int8":
        return IntegerFormat(8, None, packed=weight_only, dynamic_inputs=not weight_only)
    return _FLOATS[scheme]()


def quantization_config(chosen: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of a checkpoint whose linear layers are stored so.

    Args:
        ignore: full names of layers, or ``re:`` with a pattern, that stay plain.
    """
    inputs = chosen.input_settings()
    group = {
        "targets": ["Linear"],
        "weights": dict(chosen.weight_settings()),
        "input_activations": None if inputs is None else dict(inputs),
        "output_activations": None,
        "format": chosen.storage,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": chosen.storage,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
