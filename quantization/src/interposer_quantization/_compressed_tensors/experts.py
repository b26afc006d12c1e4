"""Selection of a fused op for routed experts of compressed-tensors checkpoints."""

from __future__ import annotations

from typing import Literal

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_quantization._compressed_tensors.stored import Stored
from interposer_quantization._experts.int4 import Int4Experts
from interposer_quantization._fp8.experts import (
    Fp8Experts,
    fp8_block_experts,
    is_fused_op_requested,
)

_FLOATS = ("float-quantized", "naive-quantized")
_STRATEGIES: tuple[Literal["tensor", "channel"], ...] = ("tensor", "channel")


def fused_experts_method(stored: Stored, site: Site, spec: ExpertsSpec) -> ExpertsMethod | None:
    """Return the fused-op method for experts in this storage format, or None."""
    weights, inputs = stored.weights, stored.inputs
    if weights.kind == "int" and inputs is None and stored.form == "pack-quantized":
        size = weights.inputs_per_scale
        if weights.bits == 4 and weights.symmetric and size and not weights.reordered:
            return Int4Experts(size)
    if weights.kind == "float" and weights.bits == 8 and stored.form in _FLOATS:
        # The op does not quantize inputs. For block scales this is accepted without a rule.
        if weights.strategy == "block" and weights.size is not None:
            return fp8_block_experts(spec, weights.size, "weight_scale")
        are_inputs_unquantized = inputs is None or (
            not inputs.static and is_fused_op_requested(site)
        )
        for strategy in _STRATEGIES:
            if weights.strategy == strategy and are_inputs_unquantized:
                return Fp8Experts(strategy, "weight_scale")
    return None
