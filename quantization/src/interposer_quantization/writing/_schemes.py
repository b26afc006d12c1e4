"""Schemes of ``interposer quantize``, and the ``quantization_config`` that each scheme writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization.writing._float_formats import (
    Fp8Format,
    Mxfp4Format,
    Mxfp8Format,
    Nvfp4Format,
)
from interposer_quantization.writing._integer_formats import IntegerFormat
from interposer_quantization.writing._weight_format import WeightFormat

SCHEMES: Mapping[str, str] = {
    "fp8": "8-bit floats, a scale for each output; inputs are rounded per token",
    "int8": "8 bits, a scale for each output; inputs are rounded per token",
    "int4": "4 bits, a scale for each group of inputs",
    "w4a8": "4 bits, a scale for each group of inputs; inputs are rounded to 8 bits per token",
    "mxfp8": "8-bit floats, a power of two for each 32 inputs; inputs are rounded alike",
    "mxfp4": "4-bit floats, a power of two for each 32 inputs",
    "nvfp4": "4-bit floats, an 8-bit float for each 16 inputs",
}
ACTIVATIONS = ("int8", "none")
"""Formats that inputs of integer weights can be rounded to."""

_INT4 = ("int4", "w4a8")
_INT4_GROUP_SIZE = 128
# Schemes with selectable input quantization, and the default.
_WITH_CHOICE = {"int8": "int8", "int4": "none"}
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
    activations: str | None = None,
) -> WeightFormat:
    """Return the weight format that a scheme of ``interposer quantize`` writes.

    Args:
        group_size: of 4-bit weights, by default 128.
        asymmetric: 4-bit weights get a zero point per group.
        activations: ``"int8"`` quantizes the inputs of int8 or int4 per token, ``"none"`` does
            not. The default is ``"int8"`` for int8 and ``"none"`` for int4; w4a8 is int4 with
            ``"int8"``.
    Raises:
        UnknownNameError: there is no such scheme.
        ConfigError: the scheme does not support the requested option.
    """
    if scheme not in SCHEMES:
        raise UnknownNameError("scheme", scheme, SCHEMES)
    described = f"{scheme} is {SCHEMES[scheme]}. Try: without this option"
    if group_size is not None and scheme not in _INT4:
        raise ConfigError(f"A group size goes with int4 and w4a8 only: {described}")
    if asymmetric and scheme not in _INT4:
        raise ConfigError(f"Zero points go with int4 and w4a8 only: {described}")
    if activations is not None and scheme not in _WITH_CHOICE:
        raise ConfigError(f"Only int8 and int4 allow a choice of activations: {described}")
    if activations not in (None, *ACTIVATIONS):
        raise UnknownNameError("activations", activations, ACTIVATIONS)
    if group_size is not None and group_size < 1:
        raise ConfigError(f"The group size is {group_size}, must be positive")
    if scheme in _FLOATS:
        return _FLOATS[scheme]()
    has_dynamic_inputs = (activations or _WITH_CHOICE.get(scheme, "int8")) == "int8"
    # Only the 4-bit schemes have groups.
    size = group_size or _INT4_GROUP_SIZE if scheme in _INT4 else None
    # Other runtimes read weights with quantized inputs only unpacked.
    return IntegerFormat(
        8 if size is None else 4,
        size,
        symmetric=not asymmetric,
        packed=not has_dynamic_inputs,
        dynamic_inputs=has_dynamic_inputs,
    )


def quantization_config(chosen: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint with linear layers in this format.

    Args:
        ignore: full names of layers, or ``re:`` with a pattern, that stay unquantized.
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
