"""Test cases of linear layers of int8 inputs and 8-bit or 4-bit integer weights.

I input features, O output features, G groups of S inputs that share a scale of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import random_integers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    Arguments,
    LinearFormat,
    bias_of,
    features_of,
    scaled_groups,
)
from interposer_ops.quantizers._small_floats import pack_nibbles, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, peak, uniform

# Shape of x without its last dimension, I, O.
_INT8_SHAPES = {
    "many rows": ((33,), 256, 96),
    "one row": ((1,), 512, 48),
    "odd sizes": ((5,), 127, 65),
    "one element": ((1,), 1, 1),
    "a row and a column after 128": ((129,), 64, 129),
    "no rows": ((0,), 64, 32),
    "three dimensions": ((2, 3), 64, 48),
    "long sum": ((3,), 4096, 16),
}
# Shape of x, O, S.
_W4A8_SHAPES = {
    "groups of 32": ((7, 128), 40, 32),
    "groups of 64": ((5, 192), 37, 64),
    "groups of 128, one row": ((1, 1024), 64, 128),
    "one scale per output": ((33, 256), 64, 256),
    "one input pair": ((2, 2), 1, 2),
    "a row and a column after 128": ((129, 64), 129, 32),
    "no rows": ((0, 64), 16, 32),
    "three dimensions": ((2, 3, 96), 32, 32),
    "long sum": ((3, 4096), 24, 128),
    "long group": ((2, 4096), 24, 4096),
    "odd groups": ((3, 90), 11, 15),
}
# Rows of extreme codes make a sum of few terms exceed 16 bits; int8 has no negative of -128.
_INT8_CODES = {"": "", "ends of int8": "ends"}
_W4A8_CODES = {"": "", "ends of codes": "ends"}
# Standard deviations of uniformly distributed codes of eight and of four bits.
_DEVIATION, _W4_DEVIATION = 74.0, 4.6


def _draw_int8(
    dims: Dims,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    codes: str = "",
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    per_output = dims["weight_scales"] == "channel"
    draw = _ends if codes else random_integers
    weight = draw(8, (out_features, in_features), generator)
    weight_scale = _scales((out_features,) if per_output else (1,), _DEVIATION, generator)
    inputs = _inputs(dims, rows, generator, shifted=bool(dims["asymmetric"]), draw=draw)
    return {
        "x": inputs["x"],
        "weight": weight,
        "x_scale": inputs["x_scale"],
        "weight_scale": weight_scale * in_features**-0.5,
        "x_zero_point": inputs["x_zero_point"],
        "bias": None,
        "out_dtype": dtype,
    }


def _dequantize_int8(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = arguments["weight"].to(wide) * arguments["weight_scale"].to(wide).unsqueeze(-1)
    return _shifted_inputs(arguments, wide), weight


def _zero_point_sums(arguments: Arguments, weight: Tensor) -> float:
    """Return the largest term that the inputs' zero points add to a result, or 0."""
    zero_point, x_scale = arguments["x_zero_point"], arguments["x_scale"]
    if zero_point is None:
        return 0.0
    return peak(zero_point.double() * x_scale.double()) * peak(weight.sum(-1))


# A kernel may scale the sum first and subtract the term of the zero points afterwards.
_INT8 = LinearFormat(_draw_int8, _dequantize_int8, scalings=3, beside=_zero_point_sums)


def _int8_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features = point["shape"]
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "x_scales": point["x scales"],
        "weight_scales": point["weight scales"],
        "asymmetric": point["zero point"],
    }
    options = {"biased": point["bias"], "codes": point["codes"]}
    case = _INT8.case(dims, rows, dtype, generator, **options)
    # The sum is exact: only the conversion to float32 and the scalings round.
    return replace(case, reduction=6)


int8_linear_cases = CaseSpace(
    _int8_linear,
    Axis("shape", _INT8_SHAPES),
    Axis("codes", _INT8_CODES),
    Axis("x scales", {"": "tensor", "token": "token"}),
    Axis("weight scales", {"": "tensor", "channel": "channel"}),
    Axis("zero point", {"": False, "zero point": True}),
    Axis("bias", {"": False, "bias": True}),
    strided={
        "x": "leading",
        **dict.fromkeys(("weight", "x_scale", "weight_scale", "x_zero_point", "bias"), "offset"),
    },
    varying={"x_scale": ("rank",), "x_zero_point": ("rank",)},
    crossed={
        "shape": ("many rows", "odd sizes", "three dimensions"),
        "codes": ("",),
        "x scales": ("token",),
        "weight scales": ("channel",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    # One element has one scale in either granularity; extreme codes test sums, not scales.
    valid=lambda point, _: (
        not (
            (point.labels["shape"] == "one element" or point["codes"])
            and (point["x scales"] == "token" or point["weight scales"] == "channel")
        )
    ),
)
"""All combinations of scale granularities, zero points, and codes at the ends of int8."""


int8_linear_sample = _INT8.sample


def _w4a8(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_features, group_size = point["shape"]
    dims = {
        "in_features": shape[-1],
        "out_features": out_features,
        "group_size": group_size,
        "num_groups": shape[-1] // group_size,
        "x_scales": point["x scales"],
        "asymmetric_inputs": point["x zero points"],
        "asymmetric_weights": point["weight zero points"],
        "biased": point["bias"],
    }
    arguments = _draw_w4a8(dims, shape, dtype, generator)
    if point["codes"] == "ends":
        arguments["x"] = _ends(8, shape, generator)
        codes = _ends(4, (out_features, shape[-1]), generator)
        arguments["weight"] = pack_nibbles(codes)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    x, weight = _groups(arguments)
    sums = torch.einsum("...gs,ogs->...og", x, weight).abs().sum(-1)
    offset = 0.0 if bias is None else peak(bias)
    return _w4a8_case({**arguments, "bias": bias}, dims, weight, peak(sums) + offset)


w4a8_linear_cases = CaseSpace(
    _w4a8,
    Axis("shape", _W4A8_SHAPES),
    Axis("codes", _W4A8_CODES),
    Axis("x scales", {"": "token", "one scale of x": "tensor"}),
    Axis("x zero points", {"": False, "x zero points": True}),
    Axis("weight zero points", {"": False, "weight zero points": True}),
    Axis("bias", {"": False, "bias": True}),
    strided={
        "x": "leading",
        **dict.fromkeys(
            ("weight", "x_scale", "weight_scales", "x_zero_point", "weight_zero_points", "bias"),
            "offset",
        ),
    },
    varying={"x_scale": ("rank",), "x_zero_point": ("rank",)},
    crossed={
        "shape": ("groups of 32", "one scale per output", "three dimensions"),
        "codes": ("",),
        "x scales": ("",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    # Sums of extreme codes are largest with both zero points; one scale for all rows does not
    # affect weights.
    valid=lambda point, _: (
        not (
            (point["codes"] and point["x zero points"] != point["weight zero points"])
            or (point["x scales"] == "tensor" and (point["codes"] or point["weight zero points"]))
        )
    ),
)
"""Sizes of groups, zero points of either operand or none, and codes at the ends of the range."""


def w4a8_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of quantized hidden states and a weight, with a bias if the dims state it."""
    generator = torch.Generator().manual_seed(seed)
    arguments = _draw_w4a8(dims, (num_tokens, int(dims["in_features"])), dtype, generator)
    x, weight = _groups(arguments)
    terms = longest_row(x.flatten(-2)) * longest_row(weight.flatten(-2))
    if dims.get("biased"):
        arguments["bias"] = bias_of(len(weight), dtype, generator.manual_seed(seed + 1))
        terms += peak(arguments["bias"])
    return _w4a8_case(arguments, dims, weight, terms, f"{num_tokens} tokens")


def _draw_w4a8(
    dims: Dims, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Draw arguments without a bias; the weight is drawn first."""
    in_features, out_features = features_of(dims)
    grouped = (out_features, int(dims["num_groups"]))
    weight = torch.randint(0, 256, (out_features, in_features // 2), generator=generator)
    weight_scales = _scales(grouped, _W4_DEVIATION * in_features**0.5, generator)
    zero_points = random_integers(4, grouped, generator) if dims["asymmetric_weights"] else None
    inputs = _inputs(dims, shape[:-1], generator, shifted=bool(dims["asymmetric_inputs"]))
    return {
        "x": inputs["x"],
        "weight": weight.to(torch.uint8),
        "x_scale": inputs["x_scale"],
        "weight_scales": weight_scales,
        "x_zero_point": inputs["x_zero_point"],
        "weight_zero_points": zero_points,
        "bias": None,
        "out_dtype": dtype,
    }


def _groups(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Dequantize to float64 groups of inputs ``[..., G, S]`` and of the weight ``[O, G, S]``."""
    scales, zero_points = arguments["weight_scales"], arguments["weight_zero_points"]
    codes = unpack_nibbles(arguments["weight"]).double()
    zero = 8.0 if zero_points is None else zero_points.double()
    weight = scaled_groups(codes, scales.double(), zero)
    groups = (scales.shape[1], codes.shape[1] // scales.shape[1])
    x = _shifted_inputs(arguments, torch.float64)
    return x.unflatten(-1, groups), weight.unflatten(1, groups)


def _w4a8_case(
    arguments: Arguments, dims: Dims, weight: Tensor, magnitude: float, label: str = ""
) -> Case:
    """Build a case; the absolute values of a result's group sums add up to at most ``magnitude``.

    The sum of a group is exact. The conversion to float32, the two scalings, the bias and the
    additions of groups round. A kernel may sum groups without the zero points of the inputs and
    subtract these terms afterwards. The number of additions then doubles.

    Args:
        weight: groups ``[O, G, S]``, dequantized.
    """
    num_groups, zero = weight.shape[1], arguments["x_zero_point"]
    zero_point_sums = 0.0
    if zero is not None:
        largest_sum = peak(weight.sum(-1).abs().sum(-1))
        zero_point_sums = 2 * peak(zero.double() * arguments["x_scale"].double()) * largest_sum
    additions = num_groups if zero is None else 2 * num_groups
    return Case(
        label, arguments, dims, reduction=additions + 4, magnitude=magnitude + zero_point_sums
    )


def _inputs(
    dims: Dims,
    rows: tuple[int, ...],
    generator: torch.Generator,
    *,
    shifted: bool,
    draw: Callable[[int, tuple[int, ...], torch.Generator], Tensor] = random_integers,
) -> dict[str, Any]:
    """Draw ``x``, the scales of ``x`` and, if ``shifted``, the zero points of ``x``."""
    scale_shape = (*rows, 1) if dims["x_scales"] == "token" else (1,)
    x = draw(8, (*rows, int(dims["in_features"])), generator)
    x_scale = _scales(scale_shape, _DEVIATION, generator)
    zero_point = random_integers(8, scale_shape, generator, torch.int32) if shifted else None
    return {"x": x, "x_scale": x_scale, "x_zero_point": zero_point}


def _shifted_inputs(arguments: Arguments, wide: torch.dtype) -> Tensor:
    """Return the dequantized inputs: (code - zero point) * scale."""
    zero_point = arguments["x_zero_point"]
    shifted = arguments["x"].to(wide) - (0 if zero_point is None else zero_point)
    result: Tensor = shifted * arguments["x_scale"].to(wide)
    return result


def _ends(bits: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw rows of one repeated code: the smallest or the largest one."""
    low, high, dtype = (0, 15, torch.uint8) if bits == 4 else (-128, 127, torch.int8)
    upper = torch.randint(0, 2, (*shape[:-1], 1), generator=generator).bool()
    return torch.where(upper, high, low).to(dtype).expand(shape).clone()


def _scales(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Draw scales between half and twice 1 / ``deviation``, so that numbers are around 1."""
    return uniform(shape, torch.float32, generator, 0.5 / deviation, 2.0 / deviation)
