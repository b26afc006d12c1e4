"""Cases of projections by integer weights. I input, O output features, G inputs per scale."""

from __future__ import annotations

import math

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    bias_of,
    linear_case,
    sampled_case,
)
from interposer_ops.quantizers._small_floats import pack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, normal, uniform

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
# The standard deviations of codes that are all equally likely.
_W4_DEVIATION, _W8_DEVIATION = 4.6, 74.0
_BIAS = {"": False, "bias": True}
_ZERO_POINTS = {"": False, "zero points": True}
_STRIDED: dict[str, Strides] = {
    "x": "rows",
    "weight": "offset",
    "scale": "offset",
    "bias": "offset",
}


def _w4a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_features, group_size = point["shape"]
    in_features = shape[-1]
    codes = _codes4((out_features, in_features), generator)
    grouped = (out_features, in_features // group_size)
    float32_scales = point["scales"] or dtype == torch.float32
    scale = _w4_scales(grouped, in_features, torch.float32 if float32_scales else dtype, generator)
    zero_points = _codes4(grouped, generator) if point["zero points"] else None
    x = normal(shape, dtype, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "weight": pack_nibbles(codes),
        "scale": scale,
        "bias": bias,
        "zero_points": zero_points,
    }
    dims = {
        **_dims(in_features, out_features, group_size, zero_points),
        "scale_dtype": str(scale.dtype).removeprefix("torch."),
    }
    dequantized = _dequantized(codes, scale, 8 if zero_points is None else zero_points)
    return linear_case(arguments, dims, x.double(), dequantized, bias, 1, stored_product=True)


def _w8a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_features, group_size = point["shape"]
    in_features = shape[-1]
    num_groups = in_features // group_size
    weight = _codes8((out_features, in_features), generator)
    scale = _w8_scales((out_features, num_groups), in_features, generator)
    if point["weights"] == "ends":
        pair = torch.tensor([-128, 127], dtype=torch.int8)
        weight = pair.repeat(out_features, -(-in_features // 2))[:, :in_features].contiguous()
    elif point["weights"] == "zeros":
        scale[::2] = 0
    zero_points = _codes8(scale.shape, generator) if point["zero points"] else None
    x = normal(shape, dtype, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "weight": weight,
        "scale": scale.flatten() if point["flat"] else scale,
        "bias": bias,
        "zero_points": zero_points,
    }
    dims = _dims(in_features, out_features, group_size, zero_points)
    dequantized = _dequantized(weight, scale, 0 if zero_points is None else zero_points)
    # A kernel may add the products with the codes and with the zero points apart.
    beside = 0.0
    if zero_points is not None:
        parts = _dequantized(zero_points.repeat_interleave(group_size, 1), scale, 0)
        beside = 2 * float((x.double().abs() @ parts.abs().T).max()) if x.numel() else 0.0
    return linear_case(
        arguments, dims, x.double(), dequantized, bias, 1, beside, stored_product=True
    )


w4a16_linear_cases = CaseSpace(
    _w4a16,
    Axis("shape", _W4_SHAPES),
    Axis("zero points", _ZERO_POINTS),
    Axis("scales", {"": False, "float32 scales": True}),
    Axis("bias", _BIAS),
    strided={**_STRIDED, "zero_points": "offset"},
    crossed={
        "shape": ("groups of 32", "groups of 64", "one scale per output", "three dimensions"),
        "scales": ("",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: not point["scales"] or dtype != torch.float32,
)
"""Sizes of groups, zero points or none, and scales in the dtype of ``x`` or in float32.

Scales in the dtype of ``x`` have four bits, so that a dequantized weight has eight: kernels that
round it to that dtype, as many do, lose nothing.
"""

w8a16_linear_cases = CaseSpace(
    _w8a16,
    Axis("shape", _W8_SHAPES),
    Axis("weights", {"": "", "ends of int8": "ends", "scales of zero": "zeros"}),
    Axis("zero points", _ZERO_POINTS),
    Axis("flat", {"": False, "flat scales": True}),
    Axis("bias", _BIAS),
    strided={**_STRIDED, "zero_points": "offset"},
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


def w4a16_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    codes = _codes4((out_features, in_features), generator)
    grouped = (out_features, in_features // int(dims["group_size"]))
    scale = _w4_scales(grouped, in_features, getattr(torch, str(dims["scale_dtype"])), generator)
    zero_points = _codes4(grouped, generator) if dims["asymmetric"] else None
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    arguments = {
        "x": x,
        "weight": pack_nibbles(codes),
        "scale": scale,
        "bias": None,
        "zero_points": zero_points,
    }
    dequantized = _dequantized(codes, scale, 8 if zero_points is None else zero_points)
    return sampled_case(arguments, dims, x, dequantized, 1)


def w8a16_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _codes8((out_features, in_features), generator)
    grouped = (out_features, in_features // int(dims["group_size"]))
    scale = _w8_scales(grouped, in_features, generator)
    zero_points = _codes8(grouped, generator) if dims["asymmetric"] else None
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    arguments = {
        "x": x,
        "weight": weight,
        "scale": scale,
        "bias": None,
        "zero_points": zero_points,
    }
    dequantized = _dequantized(weight, scale, 0 if zero_points is None else zero_points)
    return sampled_case(arguments, dims, x, dequantized, 1)


def _codes4(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)


def _codes8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def _w4_scales(
    shape: tuple[int, int], in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return scales that keep outputs around one, of four bits unless they are float32."""
    size = 1 / (_W4_DEVIATION * in_features**0.5)
    if dtype == torch.float32:
        return uniform(shape, dtype, generator, 0.5 * size, 2.0 * size)
    mantissas = torch.randint(8, 16, shape, generator=generator).to(torch.float32)
    exponents = torch.randint(-1, 1, shape, generator=generator) + round(math.log2(size)) - 3
    return torch.ldexp(mantissas, exponents).to(dtype)


def _w8_scales(
    shape: tuple[int, int], in_features: int, generator: torch.Generator
) -> torch.Tensor:
    """Return scales that differ by up to four times and keep outputs around one."""
    size = 1 / (_W8_DEVIATION * in_features**0.5)
    return uniform(shape, torch.float32, generator, 0.5 * size, 2.0 * size)


def _dequantized(
    codes: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | int
) -> torch.Tensor:
    """Return the float64 weights ``[O, I]``."""
    zero = torch.as_tensor(zero_points, dtype=torch.float64).unsqueeze(-1)
    grouped = codes.double().unflatten(1, (scale.shape[1], codes.shape[1] // scale.shape[1]))
    result: torch.Tensor = ((grouped - zero) * scale.double().unsqueeze(-1)).flatten(1)
    return result


def _dims(
    in_features: int, out_features: int, group_size: int, zero_points: torch.Tensor | None
) -> dict[str, int | bool | str]:
    return {
        "in_features": in_features,
        "out_features": out_features,
        "group_size": group_size,
        "num_groups": in_features // group_size,
        "asymmetric": zero_points is not None,
    }
