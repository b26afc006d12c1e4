"""Cases of projections of int8 by weights of four bits.

I input features, O output features, G groups of S inputs that share a scale of the weight.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops.quantized_linear._quantized_linear_cases import bias_of
from interposer_ops.quantizers._small_floats import pack_nibbles, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, peak, uniform

# Shape of x, O, S.
_SHAPES = {
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
# Rows of the ends of both ranges make the sum of a few products exceed 16 bits; -128 has no
# negative.
_CODES = {"": "", "ends of codes": "ends"}
# The standard deviations of codes that are all equally likely.
_INPUT_DEVIATION, _WEIGHT_DEVIATION = 74.0, 4.6


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
    }
    arguments = _arguments(dims, shape, dtype, generator)
    if point["codes"] == "ends":
        arguments["x"] = _ends(-128, 127, shape, torch.int8, generator)
        codes = _ends(0, 15, (out_features, shape[-1]), torch.uint8, generator)
        arguments["weight"] = pack_nibbles(codes)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    x, weight = _groups(arguments)
    sums = torch.einsum("...gs,ogs->...og", x, weight).abs().sum(-1)
    offset = 0.0 if bias is None else peak(bias)
    return _case({**arguments, "bias": bias}, dims, weight, peak(sums) + offset)


w4a8_linear_cases = CaseSpace(
    _w4a8,
    Axis("shape", _SHAPES),
    Axis("codes", _CODES),
    Axis("x scales", {"": "token", "one scale of x": "tensor"}),
    Axis("x zero points", {"": False, "x zero points": True}),
    Axis("weight zero points", {"": False, "weight zero points": True}),
    Axis("bias", {"": False, "bias": True}),
    strided={
        "x": "rows",
        "weight": "offset",
        "x_scale": "offset",
        "weight_scales": "offset",
        "x_zero_point": "offset",
        "weight_zero_points": "offset",
        "bias": "offset",
    },
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
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    arguments = _arguments(dims, (num_tokens, int(dims["in_features"])), dtype, generator)
    x, weight = _groups(arguments)
    terms = longest_row(x.flatten(-2)) * longest_row(weight.flatten(-2))
    return _case(arguments, dims, weight, terms, f"{num_tokens} tokens")


def _arguments(
    dims: Dims, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Return arguments without bias; those of the weight are drawn first."""
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    grouped = (out_features, int(dims["num_groups"]))
    weight = torch.randint(0, 256, (out_features, in_features // 2), generator=generator)
    weight_scales = _scales(grouped, _WEIGHT_DEVIATION * in_features**0.5, generator)
    weight_zero_points = None
    if dims["asymmetric_weights"]:
        weight_zero_points = torch.randint(0, 16, grouped, dtype=torch.uint8, generator=generator)
    of_tokens = (*shape[:-1], 1) if dims["x_scales"] == "token" else (1,)
    x = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    x_scale = _scales(of_tokens, _INPUT_DEVIATION, generator)
    x_zero_point = None
    if dims["asymmetric_inputs"]:
        x_zero_point = torch.randint(-128, 128, of_tokens, dtype=torch.int32, generator=generator)
    return {
        "x": x,
        "weight": weight.to(torch.uint8),
        "x_scale": x_scale,
        "weight_scales": weight_scales,
        "x_zero_point": x_zero_point,
        "weight_zero_points": weight_zero_points,
        "bias": None,
        "out_dtype": dtype,
    }


def _groups(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 groups of the inputs ``[..., G, S]`` and of the weight ``[O, G, S]``."""
    scales, zero_points = arguments["weight_scales"], arguments["weight_zero_points"]
    codes = unpack_nibbles(arguments["weight"]).double()
    groups = codes.unflatten(1, (scales.shape[1], codes.shape[1] // scales.shape[1]))
    zero = 8 if zero_points is None else zero_points.unsqueeze(-1)
    x, x_zero = arguments["x"].double(), arguments["x_zero_point"]
    shifted = (x - (0 if x_zero is None else x_zero)) * arguments["x_scale"].double()
    weight = (groups - zero) * scales.double().unsqueeze(-1)
    return shifted.unflatten(-1, groups.shape[1:]), weight


def _case(
    arguments: dict[str, Any],
    dims: Dims,
    weight: torch.Tensor,
    magnitude: float,
    label: str = "",
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


def _ends(
    low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return rows of one end or the other."""
    upper = torch.randint(0, 2, (*shape[:-1], 1), generator=generator).bool()
    return torch.where(upper, high, low).to(dtype).expand(shape).clone()


def _scales(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> torch.Tensor:
    """Return scales that differ by up to four times and bring codes to around one."""
    return uniform(shape, torch.float32, generator, 0.5 / deviation, 2.0 / deviation)
