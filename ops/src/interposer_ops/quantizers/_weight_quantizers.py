"""Quantizers of weights to 8-bit and 4-bit integers.

A dequantized weight is (code - zero_point) * scale; quotients are rounded to nearest, ties to even.
The integers cover the range of a group's numbers, so the largest number may saturate by half a
step. Checkpoint formats of other tools use the same scales.

O output features, I input features, G inputs per scale.

Source: compressed-tensors 0.20, for how scales cover the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened
from interposer_ops.quantizers._small_floats import pack_nibbles

_op = partial(
    standard_op,
    cases="interposer_ops.quantizers._weight_quantizers_cases",
    sample=False,
    tolerance=Tolerance(roundings=0),
    batched=("weight",),
)

# Numbers per chunk: the float32 temporaries of a chunk stay in a core's cache and are small beside
# a weight. Chunks of four million numbers take four to seven times as long.
_CHUNK_NUMBERS = 1 << 19
_MIDDLE = 8  # of the unsigned 4-bit integers


@_op("quantize_weight_int8")
def quantize_weight_int8(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantize a weight to int8 with one scale per group of inputs.

    scale = 2 max|w_g| / 255, rounded to ``scale_dtype``, 1 for a group of zeros;
    code = clamp(round(w / scale), -128, 127)

    Args:
        weight: ``[O, I]``, any float dtype. A group with an infinity or NaN has a scale that is
            not finite.
        group_size: G, a divisor of I.
    Returns: ``(quantized, scale)``: ``[O, I]`` int8 and ``[O, I / G]`` float32.
    Dims: ``in_features``, ``out_features``, ``num_groups``, ``scale_dtype``.
    """
    quantized = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = _allocate_scales(weight, group_size)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        rounded, scale[start:stop] = _quantize_symmetric(rows, group_size, scale_dtype, 8)
        quantized[start:stop] = rounded
    return quantized, scale


@_op("quantize_weight_int4")
def quantize_weight_int4(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantize a weight to 4-bit integers with one scale per group of inputs.

    scale = 2 max|w_g| / 15, rounded to ``scale_dtype``, 1 for a group of zeros;
    code = clamp(round(w / scale), -8, 7) + 8

    Args: those of ``quantize_weight_int8``; I is even.
    Returns: ``(quantized, scale)``: ``[O, I / 2]`` uint8, two values per byte, the first
        input in the low nibble, and ``[O, I / G]`` float32.
    Dims: ``in_features``, ``out_features``, ``num_groups``, ``scale_dtype``.
    """
    quantized, scale = _allocate_pairs(weight), _allocate_scales(weight, group_size)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        rounded, scale[start:stop] = _quantize_symmetric(rows, group_size, scale_dtype, 4)
        quantized[start:stop] = pack_nibbles((rounded + _MIDDLE).to(torch.uint8))
    return quantized, scale


@_op("quantize_weight_int4_asymmetric")
def quantize_weight_int4_asymmetric(
    weight: Tensor, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight to 4-bit integers with a scale and a zero point per group of inputs.

    low = min(min(w_g), 0), high = max(max(w_g), 0); scale = (high - low) / 15, 1 for a group of
    zeros; zero_point = clamp(round(-8 - low / scale), -8, 7) + 8;
    code = clamp(round(w / scale + zero_point), 0, 15)

    Args: those of ``quantize_weight_int8``; I is even.
    Returns: ``(quantized, scale, zero_points)``: ``[O, I / 2]`` uint8, two values per byte, the
        first input in the low nibble, ``[O, I / G]`` float32 and ``[O, I / G]`` uint8.
    Dims: ``in_features``, ``out_features``, ``num_groups``.
    """
    quantized, scale = _allocate_pairs(weight), _allocate_scales(weight, group_size)
    zero_points = torch.empty_like(scale, dtype=torch.uint8)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        groups = _groups(rows, group_size)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        steps = _round_scale((high - low) / 15, torch.float32)
        zero = (-_MIDDLE - low / steps).round().clamp(-_MIDDLE, _MIDDLE - 1)
        shifted = groups / steps.unsqueeze(-1) + zero.unsqueeze(-1)
        signed = shifted.round().clamp(-_MIDDLE, _MIDDLE - 1).flatten(1)
        quantized[start:stop] = pack_nibbles((signed + _MIDDLE).to(torch.uint8))
        scale[start:stop] = steps
        zero_points[start:stop] = zero + _MIDDLE
    return quantized, scale, zero_points


def row_chunks(weight: Tensor, multiple: int = 1) -> Iterator[tuple[Tensor, int]]:
    """Yield views of consecutive rows that fit a core's cache, with each first row number.

    Args:
        multiple: the number of rows of every view except the last is a multiple of this.
    """
    if torch.compiler.is_compiling():  # a loop would be unrolled for this number of rows only
        yield weight, 0
        return
    count = max(1, _CHUNK_NUMBERS // max(1, weight.shape[1] * multiple)) * multiple
    for start in range(0, len(weight), count):
        yield weight[start : start + count], start


def _quantize_symmetric(
    rows: Tensor, group_size: int, scale_dtype: torch.dtype, bits: int
) -> tuple[Tensor, Tensor]:
    """Quantize symmetrically: return signed integers, in a float dtype, and float32 scales."""
    groups = _groups(rows, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = _round_scale(torch.maximum(-low, high) * 2 / (2**bits - 1), scale_dtype)
    middle = 1 << bits - 1
    quantized = (groups / scale.unsqueeze(-1)).round().clamp(-middle, middle - 1)
    return quantized.flatten(1), scale


def _round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to ``dtype`` and return float32; a scale of 0 becomes 1."""
    facts = torch.finfo(dtype)
    # A positive scale must not round to zero: all numbers of the group would be lost.
    rounded = _round_positive(scale.clamp(min=facts.tiny * facts.eps), dtype)
    return torch.where(scale == 0, 1.0, rounded)


def _round_positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive numbers to ``dtype`` and return float32.

    Computed on the bits, because inductor removes a conversion to bfloat16 or float16 and back.
    Source: ``emulate_precision_casts`` in torch/_inductor/config.py
    """
    if scale.dtype != torch.float32 or dtype == torch.float32:
        return scale.to(dtype).to(torch.float32)
    facts, step = torch.finfo(dtype), torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    dropped_bits = int(math.log2(facts.eps / torch.finfo(torch.float32).eps))
    bits = scale.view(torch.int32)
    half = (1 << (dropped_bits - 1)) - 1 + ((bits >> dropped_bits) & 1)  # ties to even
    normal = ((bits + half) & (-1 << dropped_bits)).view(torch.float32)
    rounded = torch.where(scale < facts.tiny, (scale / step).round() * step, normal)
    finite = torch.where(rounded > facts.max, math.inf, rounded)
    return torch.where(scale.isnan(), scale, finite)


def _groups(rows: Tensor, group_size: int) -> Tensor:
    groups: Tensor = widened(rows).unflatten(1, (rows.shape[1] // group_size, group_size))
    return groups


def _allocate_pairs(weight: Tensor) -> Tensor:
    return weight.new_empty((len(weight), weight.shape[1] // 2), dtype=torch.uint8)


def _allocate_scales(weight: Tensor, group_size: int) -> Tensor:
    shape = len(weight), weight.shape[1] // group_size
    return weight.new_empty(shape, dtype=torch.float32)
