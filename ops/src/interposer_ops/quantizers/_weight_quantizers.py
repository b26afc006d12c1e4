"""Weights that are rounded to integers. O output features, I input features, G inputs per scale.

(code - zero_point) * scale gives a weight back, but for the rounding: quotients are rounded to
nearest, ties to even. The scales of other tools' formats are these too, as the whole range of codes
stands for the range of a group's numbers, of which the largest may be cut by half a step.

Source: the way scales span the range is that of compressed-tensors 0.20.
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

# Numbers that are widened at a time: all that is computed with then stays in a core's cache, and is
# small beside a weight. Four million at a time take four to seven times as long.
_AT_A_TIME = 1 << 19
_MIDDLE = 8  # of the codes of four bits


@_op("quantize_weight_int8")
def quantize_weight_int8(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round every group of inputs to codes of eight bits with a scale of its own.

    scale = 2 max|w_g| / 255, as ``scale_dtype`` has it, 1 for a group of zeros;
    code = clamp(round(w / scale), -128, 127)

    Args:
        weight: ``[O, I]``, any float dtype. The scale of a group that holds what is no finite
            number is none either.
        group_size: G, which divides I.
    Returns: ``(codes, scale)``: ``[O, I]`` int8 and ``[O, I / G]`` float32.
    Dims: ``in_features``, ``out_features``, ``num_groups``, ``scale_dtype``.
    """
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = _scales_of(weight, group_size)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        rounded, scale[start:stop] = _symmetric(rows, group_size, scale_dtype, 8)
        codes[start:stop] = rounded
    return codes, scale


@_op("quantize_weight_int4")
def quantize_weight_int4(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round every group of inputs to codes of four bits with a scale of its own.

    scale = 2 max|w_g| / 15, as ``scale_dtype`` has it, 1 for a group of zeros;
    code = clamp(round(w / scale), -8, 7) + 8

    Args: those of ``quantize_weight_int8``; I is even.
    Returns: ``(codes, scale)``: ``[O, I / 2]`` uint8, each of two codes, that of the first input in
        the low nibble, and ``[O, I / G]`` float32.
    Dims: ``in_features``, ``out_features``, ``num_groups``, ``scale_dtype``.
    """
    codes, scale = _pairs_of(weight), _scales_of(weight, group_size)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        rounded, scale[start:stop] = _symmetric(rows, group_size, scale_dtype, 4)
        codes[start:stop] = pack_nibbles((rounded + _MIDDLE).to(torch.uint8))
    return codes, scale


@_op("quantize_weight_int4_asymmetric")
def quantize_weight_int4_asymmetric(
    weight: Tensor, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Round every group of inputs to codes of four bits with a scale and a zero point of its own.

    low = min(min(w_g), 0), high = max(max(w_g), 0); scale = (high - low) / 15, 1 for a group of
    zeros; zero_point = clamp(round(-8 - low / scale), -8, 7) + 8;
    code = clamp(round(w / scale + zero_point), 0, 15)

    Args: those of ``quantize_weight_int8``; I is even.
    Returns: ``(codes, scale, zero_points)``: ``[O, I / 2]`` uint8, each of two codes, that of the
        first input in the low nibble, ``[O, I / G]`` float32 and ``[O, I / G]`` uint8.
    Dims: ``in_features``, ``out_features``, ``num_groups``.
    """
    codes, scale = _pairs_of(weight), _scales_of(weight, group_size)
    zero_points = torch.empty_like(scale, dtype=torch.uint8)
    for rows, start in row_chunks(weight):
        stop = start + len(rows)
        groups = _groups(rows, group_size)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        steps = _stored((high - low) / 15, torch.float32)
        zero = (-_MIDDLE - low / steps).round().clamp(-_MIDDLE, _MIDDLE - 1)
        shifted = groups / steps.unsqueeze(-1) + zero.unsqueeze(-1)
        signed = shifted.round().clamp(-_MIDDLE, _MIDDLE - 1).flatten(1)
        codes[start:stop] = pack_nibbles((signed + _MIDDLE).to(torch.uint8))
        scale[start:stop] = steps
        zero_points[start:stop] = zero + _MIDDLE
    return codes, scale, zero_points


def row_chunks(weight: Tensor, multiple: int = 1) -> Iterator[tuple[Tensor, int]]:
    """Yield views of some rows at a time, and which one is the first.

    Args:
        multiple: of which their numbers are multiples, except for the last ones.
    """
    if torch.compiler.is_compiling():  # how many there are would hold for this number of rows
        yield weight, 0
        return
    count = max(1, _AT_A_TIME // max(1, weight.shape[1] * multiple)) * multiple
    for start in range(0, len(weight), count):
        yield weight[start : start + count], start


def _symmetric(
    rows: Tensor, group_size: int, scale_dtype: torch.dtype, bits: int
) -> tuple[Tensor, Tensor]:
    """Return signed codes, not yet integers in type, and float32 scales."""
    groups = _groups(rows, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = _stored(torch.maximum(-low, high) * 2 / (2**bits - 1), scale_dtype)
    middle = 1 << bits - 1
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-middle, middle - 1)
    return codes.flatten(1), scale


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales as ``dtype`` has them, in float32; 1 for those that are 0."""
    facts = torch.finfo(dtype)
    # No number but zero may be lost to a scale that is too small for the dtype.
    kept = _rounded(scale.clamp(min=facts.tiny * facts.eps), dtype)
    return torch.where(scale == 0, 1.0, kept)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 of what positive numbers are in ``dtype``.

    Spelled out, as inductor leaves out a conversion to bfloat16 or float16 and back. Source:
    ``emulate_precision_casts`` in torch/_inductor/config.py
    """
    if scale.dtype != torch.float32 or dtype == torch.float32:
        return scale.to(dtype).to(torch.float32)
    facts, step = torch.finfo(dtype), torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    dropped = int(math.log2(facts.eps / torch.finfo(torch.float32).eps))
    bits = scale.view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)  # what ends in a half becomes even
    normal = ((bits + half) & (-1 << dropped)).view(torch.float32)
    rounded = torch.where(scale < facts.tiny, (scale / step).round() * step, normal)
    finite = torch.where(rounded > facts.max, math.inf, rounded)
    return torch.where(scale.isnan(), scale, finite)


def _groups(rows: Tensor, group_size: int) -> Tensor:
    groups: Tensor = widened(rows).unflatten(1, (rows.shape[1] // group_size, group_size))
    return groups


def _pairs_of(weight: Tensor) -> Tensor:
    return weight.new_empty((len(weight), weight.shape[1] // 2), dtype=torch.uint8)


def _scales_of(weight: Tensor, group_size: int) -> Tensor:
    shape = len(weight), weight.shape[1] // group_size
    return weight.new_empty(shape, dtype=torch.float32)
