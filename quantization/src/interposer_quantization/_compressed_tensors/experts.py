"""Routed experts of checkpoints of the compressed-tensors library, for which there is an op."""

from __future__ import annotations

from typing import Literal

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_quantization._compressed_tensors.stored import Stored
from interposer_quantization._experts.int4 import Int4Experts
from interposer_quantization._fp8.experts import Fp8Experts, fp8_blocks, is_asked_for

_FLOATS = ("float-quantized", "naive-quantized")
_STRATEGIES: tuple[Literal["tensor", "channel"], ...] = ("tensor", "channel")


def experts_at_once(stored: Stored, site: Site, spec: ExpertsSpec) -> ExpertsMethod | None:
    """Return the method for experts of which all matrices are stored so, None without an op."""
    weights, inputs = stored.weights, stored.inputs
    if weights.kind == "int" and inputs is None and stored.form == "pack-quantized":
        size = weights.inputs_per_scale
        if weights.bits == 4 and weights.symmetric and size and not weights.reordered:
            return Int4Experts(size)
    if weights.kind == "float" and weights.bits == 8 and stored.form in _FLOATS:
        # The op takes inputs as they are; of blocks it does so whatever the checkpoint says.
        if weights.strategy == "block" and weights.size is not None:
            return fp8_blocks(spec, weights.size, "weight_scale")
        as_they_are = inputs is None or (not inputs.static and is_asked_for(site))
        for strategy in _STRATEGIES:
            if weights.strategy == strategy and as_they_are:
                return Fp8Experts(strategy, "weight_scale")
    return None
