"""Cases of projections of int8 by weights of eight and of four bits.

I input features, O output features, G groups of S inputs that share a scale of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import codes_of
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
# Rows of the ends of ranges make the sum of a few products exceed 16 bits; -128 has no negative.
_INT8_CODES = {"": "", "ends of int8": "ends"}
_W4A8_CODES = {"": "", "ends of codes": "ends"}
# The standard deviations of codes that are all equally likely, of eight and of four bits.
_DEVIATION, _W4_DEVIATION = 74.0, 4.6


def _int8_drawn(
    dims: Dims,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    codes: str = "",
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    per_output = dims["weight_scales"] == "channel"
    draw = _ends if codes else codes_of
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


def _int8_dequantized(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = arguments["weight"].to(wide) * arguments["weight_scale"].to(wide).unsqueeze(-1)
    return _shifted_inputs(arguments, wide), weight


def _shares(arguments: Arguments, weight: Tensor) -> float:
    """Return a bound of what a zero point adds to a sum, 0 without one."""
    zero_point, x_scale = arguments["x_zero_point"], arguments["x_scale"]
    if zero_point is None:
        return 0.0
    return peak(zero_point.double() * x_scale.double()) * peak(weight.sum(-1))


# A kernel may subtract the zero point's share only after it has scaled the sum.
_INT8 = LinearFormat(_int8_drawn, _int8_dequantized, scalings=3, beside=_shares)


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
    # The sum is exact: only its conversion and the scalings round.
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
    # One element has one scale either way; where codes are at their ends, scales matter no more.
    valid=lambda point, _: (
        not (
            (point.labels["shape"] == "one element" or point["codes"])
            and (point["x scales"] == "token" or point["weight scales"] == "channel")
        )
    ),
)
"""Granularities of both scales in all combinations, zero points, and the ends of int8."""


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
    arguments = _w4a8_drawn(dims, shape, dtype, generator)
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
    # At the ends sums are largest with both zero points; one scale of all rows changes nothing
    # about weights.
    valid=lambda point, _: (
        not (
            (point["codes"] and point["x zero points"] != point["weight zero points"])
            or (point["x scales"] == "tensor" and (point["codes"] or point["weight zero points"]))
        )
    ),
)
"""Sizes of groups, zero points of either operand or none, and codes at the ends of their ranges."""


def w4a8_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight, with the bias that the dims state."""
    generator = torch.Generator().manual_seed(seed)
    arguments = _w4a8_drawn(dims, (num_tokens, int(dims["in_features"])), dtype, generator)
    x, weight = _groups(arguments)
    terms = longest_row(x.flatten(-2)) * longest_row(weight.flatten(-2))
    if dims.get("biased"):
        arguments["bias"] = bias_of(len(weight), dtype, generator.manual_seed(seed + 1))
        terms += peak(arguments["bias"])
    return _w4a8_case(arguments, dims, weight, terms, f"{num_tokens} tokens")


def _w4a8_drawn(
    dims: Dims, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Return arguments without bias; those of the weight are drawn first."""
    in_features, out_features = features_of(dims)
    grouped = (out_features, int(dims["num_groups"]))
    weight = torch.randint(0, 256, (out_features, in_features // 2), generator=generator)
    weight_scales = _scales(grouped, _W4_DEVIATION * in_features**0.5, generator)
    zero_points = codes_of(4, grouped, generator) if dims["asymmetric_weights"] else None
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
    """Return the float64 groups of the inputs ``[..., G, S]`` and of the weight ``[O, G, S]``."""
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
    """Return the case of sums of groups whose absolute values add up to ``magnitude`` at most.

    The sum of a group is exact: its conversion, the two scalings and the bias round, and the
    additions of groups. A kernel may take the shares of an input's zero point from groups that
    were added without it; it adds up twice as many then.

    Args:
        weight: groups ``[O, G, S]``, dequantized.
    """
    num_groups, zero = weight.shape[1], arguments["x_zero_point"]
    shares = 0.0
    if zero is not None:
        of_groups = peak(weight.sum(-1).abs().sum(-1))
        shares = 2 * peak(zero.double() * arguments["x_scale"].double()) * of_groups
    additions = num_groups if zero is None else 2 * num_groups
    return Case(label, arguments, dims, reduction=additions + 4, magnitude=magnitude + shares)


def _inputs(
    dims: Dims,
    rows: tuple[int, ...],
    generator: torch.Generator,
    *,
    shifted: bool,
    draw: Callable[[int, tuple[int, ...], torch.Generator], Tensor] = codes_of,
) -> dict[str, Any]:
    """Return ``x``, its scales and, if it is ``shifted``, its zero points."""
    of_tokens = (*rows, 1) if dims["x_scales"] == "token" else (1,)
    x = draw(8, (*rows, int(dims["in_features"])), generator)
    x_scale = _scales(of_tokens, _DEVIATION, generator)
    zero_point = codes_of(8, of_tokens, generator, torch.int32) if shifted else None
    return {"x": x, "x_scale": x_scale, "x_zero_point": zero_point}


def _shifted_inputs(arguments: Arguments, wide: torch.dtype) -> Tensor:
    """Return what ``x`` stands for."""
    zero_point = arguments["x_zero_point"]
    shifted = arguments["x"].to(wide) - (0 if zero_point is None else zero_point)
    result: Tensor = shifted * arguments["x_scale"].to(wide)
    return result


def _ends(bits: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return rows of one end of the codes or the other."""
    low, high, dtype = (0, 15, torch.uint8) if bits == 4 else (-128, 127, torch.int8)
    upper = torch.randint(0, 2, (*shape[:-1], 1), generator=generator).bool()
    return torch.where(upper, high, low).to(dtype).expand(shape).clone()


def _scales(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Return scales that differ by up to four times and bring codes to around one."""
    return uniform(shape, torch.float32, generator, 0.5 / deviation, 2.0 / deviation)
