"""Routed experts of checkpoints of the compressed-tensors library."""

from __future__ import annotations

from typing import Literal

from interposer import ExpertsMethod
from interposer.errors import ConfigError
from interposer_quantization._compressed_tensors.stored import Stored
from interposer_quantization._experts.int4 import Int4Experts
from interposer_quantization._fp8.experts import Fp8Experts

_FLOATS = ("float-quantized", "naive-quantized")
_STRATEGIES: tuple[Literal["tensor", "channel"], ...] = ("tensor", "channel")


def experts_of(prefix: str, stored: Stored) -> ExpertsMethod:
    """Return the method for experts of which all matrices are stored so.

    Raises: ConfigError: there is no op for them.
    """
    weights, inputs = stored.weights, stored.inputs
    static = inputs is not None and inputs.static
    if weights.kind == "int" and inputs is None and stored.form == "pack-quantized":
        size = weights.inputs_per_scale
        if weights.bits == 4 and weights.symmetric and size and not weights.reordered:
            return Int4Experts(size)
    if weights.kind == "float" and not static and stored.form in _FLOATS and weights.bits == 8:
        if weights.size is not None:
            return Fp8Experts(weights.size, "weight_scale")
        for strategy in _STRATEGIES:
            if weights.strategy == strategy:
                return Fp8Experts(strategy, "weight_scale")
    raise ConfigError(
        f"{prefix}: no op multiplies by experts of {stored}. Supported: 'pack-quantized' symmetric "
        "integers of 4 bits in groups, and 8-bit floats with a scale per tensor, output or block, "
        "both without stored scales of inputs. Try: quantize the experts that way, or leave them "
        "plain"
    )
