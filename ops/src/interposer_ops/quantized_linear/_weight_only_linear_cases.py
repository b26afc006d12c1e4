"""Test cases of linear layers with integer weights and float inputs.

I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers, random_integers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    Arguments,
    LinearFormat,
    features_of,
    scaled_groups,
)
from interposer_ops.quantizers._small_floats import pack_nibbles, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, peak, uniform

# Shape of x, O, G.
_W4_SHAPES = {
    "groups of 32": ((7, 128), 40, 32),
    "groups of 64": ((5, 192), 37, 64),
    "groups of 128, one row": ((1, 1024), 64, 128),
    "one scale per output": ((33, 256), 64, 256),
    "one input pair": ((2, 2), 1, 2),
    "a row and a column after 128": ((129, 64), 129, 32),
    "no rows": ((0, 64), 16, 32),
    "three dimensions": ((2, 3, 96), 32, 32),
    "long sum": ((3, 4096), 24, 128),
    "odd groups": ((3, 90), 11, 15),
    "groups of 16": ((3, 96), 11, 16),
    "groups of 24": ((3, 96), 11, 24),
}
_W8_SHAPES = {
    "groups of 32": ((7, 128), 40, 32),
    "one row": ((1, 64), 48, 64),
    "many rows": ((33, 256), 64, 256),
    "odd sizes": ((5, 127), 37, 127),
    "one input, one output": ((2, 1), 1, 1),
    "a row and a column after 128": ((129, 64), 129, 64),
    "no rows": ((0, 64), 16, 64),
    "three dimensions": ((2, 3, 96), 32, 96),
    "wide": ((2, 4096), 24, 4096),
    "groups of 128, one row": ((1, 1024), 64, 128),
    "odd groups": ((3, 75), 11, 15),
    "groups of 1": ((3, 16), 8, 1),
}
# Standard deviations of uniformly distributed codes, by number of bits.
_DEVIATIONS = {4: 4.6, 8: 74.0}
_BIAS = {"": False, "bias": True}
_ZERO_POINTS = {"": False, "zero points": True}
_STRIDED: dict[str, Strides] = {
    "x": "leading",
    **dict.fromkeys(("weight", "scale", "bias", "zero_points"), "offset"),
}


def _draw(
    dims: Dims, rows: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, bits: int,
    weights: str = "", flat: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Draw the arguments of a weight-only linear op, without a bias.

    Args:
        weights: "ends" for codes at the ends of int8, "zeros" for scales of zero, or "".
        flat: True for scales of shape ``[O]``.
    """
    in_features, out_features = features_of(dims)
    quantized = random_integers(bits, (out_features, in_features), generator)
    grouped = (out_features, in_features // int(dims["group_size"]))
    scale_dtype = getattr(torch, str(dims.get("scale_dtype", "float32")))
    scale = _scales(bits, grouped, in_features, scale_dtype, generator)
    if weights == "ends":
        pair = torch.tensor([-128, 127], dtype=torch.int8)
        quantized = pair.repeat(out_features, -(-in_features // 2))[:, :in_features].contiguous()
    elif weights == "zeros":
        scale[::2] = 0
    zero_points = random_integers(bits, grouped, generator) if dims["asymmetric"] else None
    return {
        "x": normal_numbers((*rows, in_features), dtype, generator),
        "weight": pack_nibbles(quantized) if bits == 4 else quantized,
        "scale": scale.flatten() if flat else scale,
        "bias": None,
        "zero_points": zero_points,
    }


def _dequantize(arguments: Arguments, wide: torch.dtype, *, bits: int) -> tuple[Tensor, Tensor]:
    weight, zero_points = arguments["weight"], arguments["zero_points"]
    quantized = unpack_nibbles(weight) if bits == 4 else weight
    scales = arguments["scale"].to(wide).reshape(len(quantized), -1)
    zero = (8.0 if bits == 4 else 0.0) if zero_points is None else zero_points.to(wide)
    return arguments["x"].to(wide), scaled_groups(quantized.to(wide), scales, zero)


_W4, _W8 = (
    LinearFormat(
        partial(_draw, bits=bits),
        partial(_dequantize, bits=bits),
        scalings=1,
        stored_product=True,
    )
    for bits in (4, 8)
)


def _w4a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    scale_dtype = torch.float32 if point["scales"] else dtype
    dims = {**_dims(point), "scale_dtype": str(scale_dtype).removeprefix("torch.")}
    return _W4.case(dims, point["shape"][0][:-1], dtype, generator, biased=point["bias"])


def _w8a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    dims, options = _dims(point), {"weights": point["weights"], "flat": point["flat"]}
    rows = point["shape"][0][:-1]
    case = _W8.case(dims, rows, dtype, generator, biased=point["bias"], **options)
    x, zero_points = case.arguments["x"], case.arguments["zero_points"]
    if zero_points is None:
        return case
    # A kernel may sum x * codes and x * zero_points separately; each sum has its own error.
    scale = case.arguments["scale"].double().reshape(zero_points.shape)
    wide = zero_points.double() * scale
    zero_points_by_input = wide.repeat_interleave(int(dims["group_size"]), 1)
    zero_point_sums = 2 * peak(x.double().abs() @ zero_points_by_input.abs().T)
    return replace(case, magnitude=case.magnitude + zero_point_sums)


w4a16_linear_cases = CaseSpace(
    _w4a16,
    Axis("shape", _W4_SHAPES),
    Axis("zero points", _ZERO_POINTS),
    Axis("scales", {"": False, "float32 scales": True}),
    Axis("bias", _BIAS),
    strided=_STRIDED,
    crossed={
        "shape": ("groups of 32", "groups of 64", "one scale per output", "three dimensions"),
        "scales": ("",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: not point["scales"] or dtype != torch.float32,
)
"""Sizes of groups, zero points or none, and scales in the dtype of ``x`` or in float32.

Scales in the dtype of ``x`` have four significant bits, so that a dequantized weight has eight:
kernels that round dequantized weights to the dtype of ``x``, as many do, lose nothing.
"""

w8a16_linear_cases = CaseSpace(
    _w8a16,
    Axis("shape", _W8_SHAPES),
    Axis("weights", {"": "", "ends of int8": "ends", "scales of zero": "zeros"}),
    Axis("zero points", _ZERO_POINTS),
    Axis("flat", {"": False, "flat scales": True}),
    Axis("bias", _BIAS),
    strided=_STRIDED,
    varying={"scale": ("rank",)},
    crossed={
        "shape": ("groups of 32", "many rows", "odd sizes", "three dimensions"),
        "weights": ("",),
        "flat": ("",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, _: (
        (not point["flat"] or point["shape"][0][-1] == point["shape"][2])
        and not (point["weights"] and (point["flat"] or point["zero points"]))
    ),
)
"""Both granularities of scales, zero points or none, with and without bias, the ends of int8."""


w4a16_linear_sample, w8a16_linear_sample = _W4.sample, _W8.sample


def _scales(
    bits: int,
    shape: tuple[int, int],
    in_features: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Draw scales that keep outputs around 1; below float32, scales have four significant bits."""
    size = 1 / (_DEVIATIONS[bits] * in_features**0.5)
    if dtype == torch.float32:
        return uniform(shape, dtype, generator, 0.5 * size, 2.0 * size)
    mantissas = torch.randint(8, 16, shape, generator=generator).to(torch.float32)
    exponents = torch.randint(-1, 1, shape, generator=generator) + round(math.log2(size)) - 3
    return torch.ldexp(mantissas, exponents).to(dtype)


def _dims(point: Point) -> dict[str, int | bool | str]:
    shape, out_features, group_size = point["shape"]
    return {
        "in_features": shape[-1],
        "out_features": out_features,
        "group_size": group_size,
        "num_groups": shape[-1] // group_size,
        "asymmetric": point["zero points"],
    }
